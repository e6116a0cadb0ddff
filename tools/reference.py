"""Write the generated pages of docs/reference from the tables in the code.

`make lint` does not run it; tests/tidy fails when a page misses a name. Run it by hand:
`.venv/bin/python tools/reference.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from dure.core import lifecycle
from dure.core.errors import ErrorCode
from dure.core.events import EventName
from dure.core.messages import ERRORS, EVENTS, JOB_ERRORS, REASONS, STATES
from dure.core.model import JobState
from dure.core.plan import ReasonCode
from dure.core.policy import profile_fields
from dure.settings import RESERVED, Settings

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE = "<!-- Made by tools/reference.py from the code; change it there. -->\n\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in r) + " |" for r in lines) + "\n"
    )


def balanced() -> str:
    """What the other profile sets."""
    rows = [
        [f"`policy.{key}`", f"`{plain(value)}`"]
        for key, value in profile_fields("balanced").items()
    ]
    return '\n`policy.profile = "balanced"` sets:\n\n' + table(["key", "value"], rows)


def settings() -> str:
    """Every key with its variable, default and reason."""
    text = (
        "# Settings\n\n"
        + MADE
        + "A TOML file (`--config FILE` or `DURE_CONFIG`), and over it the environment: "
        "`DURE_<SECTION>__<KEY>`. An unknown key or a bad value stops the start with a sentence. "
        "Names that are no settings: " + ", ".join(f"`{name}`" for name in sorted(RESERVED)) + ".\n"
    )
    for section in msgspec.structs.fields(Settings):
        kind = section.type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            text += f"\n## [{section.name}]\n\n" + table(
                ["key", "default", "what for"],
                [
                    [f"`{section.name}.{f.name}`", f"`{plain(f.default)}`", described(f.type)]
                    for f in msgspec.inspect.type_info(kind).fields
                ],
            )
        if section.name == "policy":
            text += balanced()
    declared = {
        "[[tiers]]": "dure.settings:DeclaredTier",
        "[[node.gpus]]": "dure.settings:DeclaredGpu",
    }
    for name, where in declared.items():
        kind = getattr(sys.modules["dure.settings"], where.split(":")[1])
        text += f"\n## {name}\n\n" + table(
            ["key", "default", "what for"],
            [
                [
                    f"`{f.name}`",
                    "required" if f.required else f"`{plain(f.default)}`",
                    described(f.type),
                ]
                for f in msgspec.inspect.type_info(kind).fields
            ],
        )
    return text


def plain(value: object) -> str:
    """A default as TOML would say it."""
    if value is msgspec.NODEFAULT or value == ():
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def described(kind: object) -> str:
    """The reason that stands at the setting."""
    extra = getattr(kind, "extra_json_schema", None) or {}
    return str(extra.get("description", ""))


def both(rows: dict[str, tuple[str, str]]) -> str:
    """Code, English, Korean."""
    return table(
        ["code", "English", "한국어"], [[f"`{k}`", en, ko] for k, (en, ko) in rows.items()]
    )


def main() -> None:
    """Write all pages."""
    reference = DOCS / "reference"
    errors = {c.value: ERRORS[c][0] for c in ErrorCode}
    pages = {
        "settings": settings(),
        "errors": "# Error codes\n\n"
        + MADE
        + "Every refusal is problem details (RFC 9457) with one "
        "of these codes. Codes are stable, sentences are not.\n\n"
        + both(errors)
        + "\n## Why a job failed\n\n"
        + both(JOB_ERRORS),
        "reasons": "# Why a job waits\n\n" + MADE + both({c.value: REASONS[c] for c in ReasonCode}),
        "events": "# Events\n\n"
        + MADE
        + "One row per change, written in the change's own transaction.\n\n"
        + both({e.value: EVENTS[e.value] for e in EventName}),
        "states": "# States of a job\n\n"
        + MADE
        + both({s.value: STATES[s] for s in JobState})
        + "\n```mermaid\n"
        + lifecycle.mermaid()
        + "```\n",
    }
    for name, text in pages.items():
        (reference / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
