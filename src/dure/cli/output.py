"""Data on stdout: tables on a terminal, TSV in a pipe, JSON on request.

Rule: JSON has the API's names and is never translated; a table's cells hold no control
characters, whatever a job is called.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import click
import msgspec

from dure.cli.app import App
from dure.cli.exits import clean
from dure.cli.texts import HEADERS, pick, say

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
ALL_FIELDS = "*"
NARROWEST = 80
_FIELDS = re.compile(r"[a-z_]+(,[a-z_]+)*")


class Column(NamedTuple):
    """A column: key of its header, text of its cells, and how it is set."""

    key: str
    cell: Callable[[Any], str]
    right: bool = False
    flex: bool = False
    """May be wrapped when the terminal is narrow."""


class DataCommand(click.Command):
    """A command whose `--json` takes an optional list of fields.

    A word behind `--json` that can be no list of fields (a job number) is an argument.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Make a lone `--json` explicit."""
        end = args.index("--") if "--" in args else len(args)
        for i in range(end):
            following = args[i + 1] if i + 1 < end else ""
            if args[i] == "--json" and not _FIELDS.fullmatch(following):
                args[i] = f"--json={ALL_FIELDS}"
        ctx.meta["dure.args"] = list(args)
        return super().parse_args(ctx, args)


class Output:
    """How this call wants its data."""

    def __init__(self, fields: str | None, *, header: bool = True, quiet: bool = False) -> None:
        self._fields = fields
        self.header = header
        self.quiet = quiet
        self.asked: list[str] = []

    @property
    def json(self) -> bool:
        """Whether JSON was asked for."""
        return self._fields is not None

    def of(self, kind: type[msgspec.Struct]) -> Output:
        """Check the asked fields against a struct (before anything is sent)."""
        known = [f.encode_name for f in msgspec.structs.fields(kind)]
        asked = known if self._fields in {None, ALL_FIELDS} else str(self._fields).split(",")
        bad = [f for f in asked if f not in known]
        if bad:
            sentence = say("unknown_field", bad=", ".join(bad), known=", ".join(known))
            raise click.UsageError(f"{sentence} {say('json_last')}")
        self.asked = asked
        return self

    def rows(
        self,
        items: Sequence[msgspec.Struct],
        columns: Sequence[Column],
        name: Callable[[Any], object] | None = None,
    ) -> None:
        """Print a list; `-q` prints one `name` a line."""
        if self.json:
            print_json([self._record(item) for item in items])
        elif self.quiet:
            for item in items:
                click.echo(clean(str(name(item) if name else columns[0].cell(item))))
        else:
            cells = [[clean(c.cell(item)) for c in columns] for item in items]
            show_table(columns, cells, header=self.header)

    def one(self, item: msgspec.Struct, pairs: Sequence[tuple[str, str]], name: object) -> None:
        """Print one thing as a list of names and values; `-q` prints only `name`."""
        if self.json:
            print_json(self._record(item))
        elif self.quiet:
            click.echo(clean(str(name)))
        else:
            show_pairs(pairs)

    def result(self, items: Sequence[msgspec.Struct], *, single: bool = False) -> None:
        """Print what a change gave, if JSON was asked for."""
        if self.json:
            records = [self._record(item) for item in items]
            print_json(records[0] if single else records)

    def _record(self, item: msgspec.Struct) -> dict[str, Any]:
        whole: dict[str, Any] = msgspec.to_builtins(item)
        return {name: whole.get(name) for name in self.asked}


def data_options(
    kind: type[msgspec.Struct] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add --json, --no-header and -q; the command gets them as `out`.

    A command that prints one of several structs gives no `kind` here and calls `out.of`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @click.option(
            "--json",
            "json_fields",
            is_flag=False,
            flag_value=ALL_FIELDS,
            default=None,
            metavar="[FIELDS]",
            help="print JSON: all fields, or those named (id,state)",
        )
        @click.option("--no-header", is_flag=True, help="no header line in a pipe")
        @click.option("-q", "--quiet", is_flag=True, help="print ids or names only")
        @functools.wraps(command)
        def wrapped(
            *args: Any, json_fields: str | None, no_header: bool, quiet: bool, **kwargs: Any
        ) -> None:
            app = click.get_current_context().find_object(App)
            if json_fields is not None and app is not None:
                app.language = "en"
            out = Output(json_fields, header=not no_header, quiet=quiet)
            if kind is not None:
                out.of(kind)
            command(*args, out=out, **kwargs)

        return wrapped

    return decorate


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def console() -> Console:
    """Terminal to draw tables on; honours NO_COLOR."""
    from rich.console import Console  # noqa: PLC0415 - 30 ms that pipes do not need

    plain = bool(os.environ.get("NO_COLOR"))
    return Console(
        # Narrower than this, the terminal's own line wrap is easier to read than cells of
        # four letters.
        width=max(NARROWEST, get_terminal_size().columns),
        file=sys.stdout,
        highlight=False,
        markup=False,
        emoji=False,
        color_system=None if plain else "auto",
    )


def show_table(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], *, header: bool = True
) -> None:
    """Print an aligned table, or TSV with English headers in a pipe."""
    if not on_terminal():
        if header:
            click.echo("\t".join(HEADERS[c.key][0] for c in columns))
        for row in cells:
            click.echo("\t".join(row))
        return
    if not cells:
        return
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=header, header_style="bold")
    for c in columns:
        table.add_column(
            Text(pick(HEADERS[c.key])),
            justify="right" if c.right else "left",
            no_wrap=not c.flex,
            min_width=12 if c.flex else None,
            overflow="fold",
        )
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)


def show_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values below each other, or as TSV in a pipe."""
    shown = [(key, clean(value)) for key, value in pairs]
    if not on_terminal():
        for key, value in shown:
            click.echo(f"{HEADERS[key][0]}\t{value}")
        return
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for key, value in shown:
        if value:
            table.add_row(Text(pick(HEADERS[key])), Text(value))
    console().print(table)


def print_json(value: object) -> None:
    """Print JSON: indented on a terminal, on one line in a pipe."""
    data = msgspec.json.encode(value)
    if on_terminal():
        data = msgspec.json.format(data, indent=2)
    click.echo(data.decode())


def when(at_ms: int | None) -> str:
    """A point in time, local, to the minute; empty when there is none."""
    if not at_ms:
        return ""
    return datetime.fromtimestamp(at_ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M")


def clock(at_ms: int) -> str:
    """Time of day to the second."""
    return datetime.fromtimestamp(at_ms / 1000).astimezone().strftime("%H:%M:%S")


def gpus(count: int, min_vram_gb: float, tiers: Sequence[str] = ()) -> str:
    """What is asked for: `2 ≥24G RTX4090`."""
    parts = [str(count)]
    parts += [f"≥{min_vram_gb:g}G"] if min_vram_gb else []
    parts += ["|".join(tiers)] if tiers else []
    return " ".join(parts)


def yes_no(value: bool) -> str:
    """`yes` or `no` in the reader's language on a terminal, in English in a pipe."""
    word = "yes" if value else "no"
    return say(word) if on_terminal() else word
