"""The comparison on a terminal: tables on stdout, progress on stderr, TSV in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from shutil import get_terminal_size

import click

from dure.sim.comparison import Comparison
from dure.sim.replay import Tell
from dure.sim.texts import COLUMNS, figure, word

Teller = Callable[[str], Tell | None]
_NARROWEST = 80
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], " ")


def show(comparison: Comparison, lang: str) -> None:
    """Print the main table and the waits by GPU count."""
    reader = lang if sys.stdout.isatty() else "en"
    cells = [
        [
            c.name[reader == "ko"],
            *(figure(c, r.values[c.key], r.sd[c.key] if r.sd else None) for r in comparison.rows),
        ]
        for c in COLUMNS
    ]
    _table(["", *(row.case.name for row in comparison.rows)], cells)
    click.echo()
    keys = ("policy", "gpus", "jobs", "mean", "median", "p95", "max")
    _table([word(k, reader) for k in keys], _waits(comparison))


def _waits(comparison: Comparison) -> list[list[str]]:
    return [
        [
            row.case.name,
            str(gpus),
            str(w.jobs),
            *(f"{h:,.2f}" for h in (w.mean_h, w.median_h, w.p95_h, w.max_h)),
        ]
        for row in comparison.rows
        for gpus, w in row.by_gpus.items()
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Names on the left, figures on the right; TSV in a pipe."""
    if not sys.stdout.isatty():
        for cells in (header, *rows):
            click.echo("\t".join(cells))
        return
    from rich.console import Console  # noqa: PLC0415 - 30 ms that pipes do not need
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(header):
        table.add_column(Text(name), justify="right" if i else "left")
    for cells in rows:
        table.add_row(*(Text(cell) for cell in cells))
    width = max(_NARROWEST, get_terminal_size().columns)
    color = None if os.environ.get("NO_COLOR") else "auto"
    Console(width=width, highlight=False, color_system=color).print(table)  # type: ignore[arg-type]


def tell_facts(comparison: Comparison, lang: str) -> None:
    """What a reader must know, on stderr."""
    for key, params in comparison.facts():
        click.echo(word(key, lang, **params).translate(_CONTROLS), err=True)


@contextmanager
def progress() -> Iterator[Teller]:
    """A bar with speed for each policy, on stderr, where somebody looks at it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.progress import (  # noqa: PLC0415  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text  # noqa: PLC0415

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed or 0:,.0f}/s", style="progress.data.speed")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def teller(name: str) -> Tell:
            task = bar.add_task(name, total=None)
            return lambda done, of: bar.update(task, completed=done, total=of)

        yield teller
