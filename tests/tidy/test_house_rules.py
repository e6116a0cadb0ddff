"""House rules as tests: sizes, names, banned calls, documented things."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "dure"
FILES = sorted([*SRC.rglob("*.py"), *(ROOT / "sdk" / "src").rglob("*.py")])
TOOLS = sorted(
    [
        *(ROOT / "tools").glob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "bench").glob("*.py"),
    ]
)
BANNED_MODULES = {"utils", "common", "helpers", "base", "manager"}
LOOP_TOPS = {
    # Broad excepts: only where whatever fails is logged and tried again, or told.
    "engine/controller.py",
    "engine/forecast.py",
    "engine/watchdog.py",
    "adapters/compute/edge/backend.py",
    "wiring/doctor.py",
    "api/problems.py",
    "api/app.py",
    "cli/root.py",
    "adapters/compute/local/watch.py",
    "adapters/compute/local/supervisor.py",
    # Observation never stops training: the tops of the SDK's threads, calls and entry points.
    "dure_sdk/aside.py",
    "dure_sdk/boot/sitecustomize.py",
    "dure_sdk/collectors.py",
    "dure_sdk/monitor.py",
    "dure_sdk/sender.py",
    "dure_sdk/tracking.py",
    "adapters/compute/slurm/watch.py",
}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def tracked() -> list[str]:
    out = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return out.stdout.split()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 500, f"{len(lines)} lines"
    for node in ast.walk(tree(path)):
        size = (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert size <= 70, f"{node.name} has {size} lines"
        if isinstance(node, ast.ClassDef):
            assert size <= 300, f"{node.name} has {size} lines"


def test_no_module_is_a_heap() -> None:
    assert not [p for p in FILES if p.stem in BANNED_MODULES or p.parent.name in BANNED_MODULES]


@pytest.mark.parametrize("path", sorted((SRC / "core").glob("*.py")), ids=lambda p: p.name)
def test_core_is_pure(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "eval", "exec"}, node.lineno
        if isinstance(node, ast.AsyncFunctionDef):
            pytest.fail(f"async in core: {node.name}")


def test_only_lifecycle_names_a_transition() -> None:
    """Elsewhere a state is changed by `step`, never by naming the next one."""
    for path in [*(SRC / "core").glob("*.py"), *(SRC / "engine").glob("*.py")]:
        if path.name in {"lifecycle.py", "messages.py"}:
            continue
        for call in ast.walk(tree(path)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") != "JobView":
                for kw in call.keywords:
                    named = isinstance(kw.value, ast.Attribute) and kw.arg == "state"
                    if (
                        named
                        and isinstance(kw.value.value, ast.Name)
                        and kw.value.value.id == "JobState"
                    ):
                        # A new job has no state before its first one.
                        assert kw.value.attr == "PERSONAL_QUEUE_WAIT", f"{path.name}:{call.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_broad_excepts_only_in_loop_tops(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id == "Exception"
            )
            if broad:
                inside = SRC if path.is_relative_to(SRC) else ROOT / "sdk" / "src"
                assert str(path.relative_to(inside)) in LOOP_TOPS, f"line {node.lineno}"


@pytest.mark.parametrize("path", [*FILES, *TOOLS], ids=lambda p: str(p.relative_to(ROOT)))
def test_suppressions_name_their_rule_and_reason(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if "# noqa" in line:
            assert re.search(r"# noqa: [A-Z]+\d+", line), f"line {number}"
        if "type: ignore" in line:
            assert re.search(r"type: ignore\[[a-z-]+\]", line), f"line {number}"
        assert "pragma: no cover" not in line, f"line {number}"


def test_public_names_of_core_and_sdk_are_documented() -> None:
    for path in [
        *(SRC / "core").glob("*.py"),
        *(SRC / "ports").glob("*.py"),
        *(ROOT / "sdk" / "src").rglob("*.py"),
    ]:
        module = tree(path)
        assert ast.get_docstring(module), path
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_sdk_needs_nothing() -> None:
    project = tomllib.loads((ROOT / "sdk" / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
    assert project["requires-python"] == ">=3.9"


def test_locks_have_hashes_and_no_addresses() -> None:
    for name in ("demo.txt", "dev.txt", "track.txt", "train.txt"):
        text = (ROOT / "requirements" / name).read_text()
        assert "--hash=sha256:" in text
        assert "://" not in text
        assert not re.search(r"^torch==", text, re.MULTILINE)


def test_repository_speaks_of_the_project_alone() -> None:
    # Paths of one machine. Written so that this line does not find itself.
    folders = "|".join(["wor" + "k", "far" + "m", "roo" + "t"])
    words = re.compile(rf"(^|[^A-Za-z0-9_.-])/({folders})/")
    for name in tracked():
        path = ROOT / name
        if (
            path.suffix in {".py", ".md", ".toml", ".sh", ".txt", ""}
            and path.is_file()
            and "tidy" not in name
        ):
            assert not words.search(path.read_text(errors="replace")), name


def test_every_path_named_in_the_docs_exists() -> None:
    docs = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pattern = re.compile(r"`((?:src|docs|tests|tools|examples|bench|sdk|requirements)/[\w./-]+)`")
    for doc in docs:
        for found in pattern.findall(doc.read_text()):
            assert (ROOT / found).exists(), f"{doc.name} names {found}"


def test_changelog_is_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog")
    assert "## [Unreleased]" in text
    kinds = set(re.findall(r"^### (\w+)", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_reference_names_everything() -> None:
    """Every setting, error code, reason, event and state stands in docs/reference."""
    from dure.core.errors import ErrorCode
    from dure.core.events import EventName
    from dure.core.model import JobState
    from dure.core.plan import ReasonCode
    from dure.settings import Settings

    text = "\n".join(p.read_text() for p in (ROOT / "docs" / "reference").glob("*.md"))
    names = [x.value for e in (ErrorCode, EventName, JobState, ReasonCode) for x in e]
    for section in msgspec.structs.fields(Settings):
        kind = section.type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            names += [f"{section.name}.{f.name}" for f in msgspec.structs.fields(kind)]
    missing = [n for n in names if f"`{n}`" not in text]
    assert not missing, f"run tools/reference.py: {missing}"


def test_pages_of_the_metric_dictionary_are_current() -> None:
    """Made from the table in code: `.venv/bin/python tools/metrics.py`."""
    import runpy

    pages = runpy.run_path(str(ROOT / "tools" / "metrics.py"))["pages"]()
    for path, text in pages.items():
        assert path.read_text() == text, f"run tools/metrics.py: {path.name}"


def test_every_setting_has_a_reason() -> None:
    from dure.settings import Settings

    for section in msgspec.structs.fields(Settings):
        kind = section.type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            for field in msgspec.inspect.type_info(kind).fields:
                info = field.type
                said = isinstance(info, msgspec.inspect.Metadata) and (
                    info.extra_json_schema or {}
                ).get("description")
                assert said, f"{section.name}.{field.name}"


def test_messages_have_both_languages_and_the_same_fields() -> None:
    from string import Formatter

    from dure.core import messages as m
    from dure.core.errors import ErrorCode
    from dure.core.events import EventName
    from dure.core.plan import ReasonCode

    assert set(m.ERRORS) == set(ErrorCode)
    assert set(m.REASONS) == set(ReasonCode)
    assert set(m.EVENTS) == {e.value for e in EventName}
    pairs = [*m.STATES.values(), *m.REASONS.values(), *m.EVENTS.values(), *m.JOB_ERRORS.values()]
    pairs += [t for both in m.ERRORS.values() for t in both]
    for english, korean in pairs:
        assert english, english
        assert korean, english
        fields = [{f for _, f, _, _ in Formatter().parse(t) if f} for t in (english, korean)]
        assert fields[0] == fields[1], english
