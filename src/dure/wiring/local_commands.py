"""The commands that do not talk HTTP: server, audit, doctor. Imported only when called."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from dure.cli.texts import lang
from dure.core.errors import DureError
from dure.core.messages import ERRORS, say
from dure.settings import Settings, load


def config_option(command: click.Command) -> click.Command:
    """`--config FILE`, else DURE_CONFIG, else defaults and environment."""
    option = click.Option(
        ["--config", "config"],
        type=click.Path(path_type=Path, dir_okay=False),
        help="settings file (TOML); default: DURE_CONFIG, else built-in defaults",
    )
    command.params.insert(0, option)
    return command


def read(config: Path | None) -> Settings:
    """Settings or a clear sentence and exit 2."""
    path = config or (Path(p) if (p := os.environ.get("DURE_CONFIG")) else None)
    with refusals_in_words():
        return load(path)


@contextmanager
def refusals_in_words() -> Iterator[None]:
    """Tell a refusal as a sentence and its hint, and end with 2."""
    try:
        yield
    except DureError as error:
        sentence, hint = ERRORS[error.code]
        text = f"{say(sentence, lang(), error.params)}\n{say(hint, lang(), error.params)}"
        click.echo(text, err=True)
        sys.exit(2)


@config_option
@click.command()
@click.option("--host", help="address to listen on")
@click.option("--port", type=click.IntRange(0, 65_535), help="0: any free port")
@click.option("--state-dir", help="database, run directories, outputs")
def server(config: Path | None, host: str | None, port: int | None, state_dir: str | None) -> None:
    """Run the server of this installation in the foreground."""
    settings = read(config)
    given = {"host": host, "port": port, "state_dir": state_dir}
    changes = {k: v for k, v in given.items() if v is not None}
    settings = msgspec.structs.replace(
        settings, server=msgspec.structs.replace(settings.server, **changes)
    )
    from dure.wiring.serve import serve  # noqa: PLC0415 - the heavy half, only when serving

    with refusals_in_words():
        code = serve(settings)
    sys.exit(code)


@config_option
@click.command()
@click.option("--state-dir", help="where the server keeps its database")
@click.option("--json", "as_json", is_flag=True, help="machine-readable")
def audit(config: Path | None, state_dir: str | None, as_json: bool) -> None:
    """Prove that every GPU-second held was charged or written off exactly once."""
    settings = read(config)
    if state_dir is not None:
        placed = msgspec.structs.replace(settings.server, state_dir=state_dir)
        settings = msgspec.structs.replace(settings, server=placed)
    from dure.wiring.audit import audit as run  # noqa: PLC0415

    with refusals_in_words():
        code = run(settings, as_json=as_json)
    sys.exit(code)


@config_option
@click.command()
@click.option("--attack", "attacks", is_flag=True, help="try to break out of this machine's jails")
@click.option("--json", "as_json", is_flag=True, help="machine-readable")
def doctor(config: Path | None, attacks: bool, as_json: bool) -> None:
    """Check this machine, the settings and the server."""
    from dure.wiring.doctor import attack  # noqa: PLC0415
    from dure.wiring.doctor import doctor as run  # noqa: PLC0415

    if attacks:
        sys.exit(attack(as_json=as_json))
    path = config or (Path(p) if (p := os.environ.get("DURE_CONFIG")) else None)
    sys.exit(run(path, as_json=as_json))
