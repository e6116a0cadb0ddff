"""`dure simulate`: policies compared on a recorded or made-up load, or on the site's own past."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from dure.adapters.store.sql import SqlStore
from dure.cli.texts import lang as reader_lang
from dure.client.quantities import seconds
from dure.settings import Settings
from dure.sim.comparison import Case, Comparison, Runs, cases, compare
from dure.sim.contenders import Contender, contender
from dure.sim.files import write_csv, write_text
from dure.sim.generate import generate
from dure.sim.history import Added, History, changed, parse_added, read_history
from dure.sim.refusals import Refusal, SimulationRefused
from dure.sim.report import Heading, report
from dure.sim.terminal import progress, show, tell_facts
from dure.sim.texts import Note, word
from dure.sim.trace import read_cluster, read_trace
from dure.wiring.local_commands import config_option, read, refusals_in_words

T = TypeVar("T")


class Asked(msgspec.Struct, frozen=True):
    """The options of one call."""

    config: Path | None
    state_dir: str | None
    trace_file: Path | None
    cluster_file: Path | None
    made: int | None
    history_s: int | None
    added: tuple[Added, ...]
    removed: tuple[str, ...]
    policies: tuple[str, ...]
    slots: int | None
    jitter: int
    seed: int
    engine: bool
    as_json: bool
    csv_dir: Path | None
    report_file: Path | None
    language: str | None

    @property
    def lang(self) -> str:
        """The reader's language."""
        return self.language or reader_lang()

    @property
    def runs(self) -> Runs:
        """How the cases run."""
        return Runs(jitter=self.jitter, seed=self.seed, slots=self.slots, engine=self.engine)


class Quantity(click.ParamType[Any]):
    """An option's text as a value, or a sentence that says how it is written."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Parse; a ValueError is the sentence."""
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class KeepsArguments(click.Command):
    """A command that knows how it was called, to print that in a report."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words."""
        ctx.meta["dure.called"] = shlex.join(["dure", "simulate", *args])
        return super().parse_args(ctx, args)


_PATH = click.Path(path_type=Path, dir_okay=False)


@config_option
@click.command(cls=KeepsArguments)
@click.option("--state-dir", help="with --from-history: where the server keeps its database")
@click.option("--trace", "trace_file", type=_PATH, help="recorded load, CSV (.gz too)")
@click.option("--cluster", "cluster_file", type=_PATH, help="machines, JSON")
@click.option("--generate", "made", type=click.IntRange(1), help="this many made-up jobs")
@click.option(
    "--from-history",
    "history_s",
    metavar="TIME",
    type=Quantity("time", seconds),
    help="this installation's own load of so long until now: 30d, 12h",
)
@click.option(
    "--add-nodes",
    "added",
    metavar="TIER:GPUSxCOUNT",
    multiple=True,
    type=Quantity("tier:gpusxcount", parse_added),
    help="with --from-history: what if there were more nodes, such as RTX4090:8x2",
)
@click.option(
    "--remove-node", "removed", multiple=True, metavar="NAME", help="with --from-history: or fewer"
)
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="may be repeated")
@click.option("--slots", type=click.IntRange(0), help="personal limit of everybody; 0: none")
@click.option("--jitter", type=click.IntRange(0, 1000), default=0, help="runs with moved submits")
@click.option("--seed", type=int, default=0, help="of jitter and of a made-up load")
@click.option("--engine", is_flag=True, help="the whole engine instead of the planner alone")
@click.option("--json", "as_json", is_flag=True, help="machine-readable")
@click.option(
    "--csv", "csv_dir", type=click.Path(path_type=Path, file_okay=False), help="jobs and summary"
)
@click.option("--report", "report_file", type=_PATH, help="one HTML file with tables and charts")
@click.option("--lang", "language", type=click.Choice(["en", "ko"]), help="default: DURE_LANG")
@click.pass_context
def simulate(ctx: click.Context, /, **given: Any) -> None:
    """Replay a load under one or more policies and compare what people would have waited."""
    asked = Asked(**given)
    _check(asked)
    try:
        comparison = _compare(asked)
        _hand_out(comparison, asked, str(ctx.meta["dure.called"]))
    except SimulationRefused as refused:
        click.echo(refused.text(asked.lang), err=True)
        sys.exit(2)
    if any(row.violations for row in comparison.rows):
        sys.exit(1)


def _check(asked: Asked) -> None:
    loads = (asked.trace_file, asked.made, asked.history_s)
    if sum(x is not None for x in loads) != 1:
        raise click.UsageError("give one of --trace FILE, --generate N, --from-history TIME")
    if asked.history_s is None:
        if asked.cluster_file is None:
            raise click.UsageError("--cluster FILE says on which machines the load runs")
        if asked.added or asked.removed:
            raise click.UsageError("--add-nodes and --remove-node need --from-history")
    elif asked.cluster_file is not None:
        raise click.UsageError("--from-history has its own machines; leave out --cluster")


def _compare(asked: Asked) -> Comparison:
    wanted, notes = _cases(asked)
    with progress() as teller:
        rows = compare(wanted, asked.runs, teller)
    return Comparison(rows, asked.runs, tuple(notes))


def _cases(asked: Asked) -> tuple[list[Case], list[Note]]:
    names = dict.fromkeys(asked.policies)
    if asked.history_s is not None:
        return _cases_of_history(asked, names)
    contenders = [contender(name) for name in names or ["classic"]]
    assert asked.cluster_file is not None
    cluster = read_cluster(asked.cluster_file)
    if asked.trace_file is not None:
        trace = read_trace(asked.trace_file)
    else:
        trace = generate(asked.made or 1, 6, 7.0, asked.seed)
    return cases(contenders, trace, cluster), []


def _cases_of_history(asked: Asked, names: dict[str, None]) -> tuple[list[Case], list[Note]]:
    """The site's own policy first; with other machines also as it is today."""
    settings = _settings(asked)
    site = Contender("site", settings.policy)
    contenders = [site, *(contender(name) for name in names if name != site.name)]
    past = _past(settings, asked.history_s or 0)
    if not asked.added and not asked.removed:
        return cases(contenders, past.trace, past.cluster), [*past.notes]
    today = Contender("today", settings.policy)
    cluster, notes = changed(past.cluster, asked.added, asked.removed)
    found = cases([today], past.trace, past.cluster) + cases(contenders, past.trace, cluster)
    return found, [*past.notes, *notes, ("today", {})]


def _settings(asked: Asked) -> Settings:
    settings = read(asked.config)
    if asked.state_dir is None:
        return settings
    placed = msgspec.structs.replace(settings.server, state_dir=asked.state_dir)
    return msgspec.structs.replace(settings, server=placed)


def _past(settings: Settings, length_s: int) -> History:
    """Read the store, from one consistent view."""
    file = settings.state_dir() / "dure.db"
    where = settings.server.database or str(file)
    if not settings.server.database and not file.exists():
        # Opening it would make an empty one.
        raise SimulationRefused(Refusal.NO_HISTORY, where=where)
    with refusals_in_words():
        store = SqlStore(settings.database_url())
        try:
            with store.read() as tx:
                # The last thing that happened: a copy of an old database is worth as much.
                newest = tx.events(after=max(0, tx.last_event_id() - 1), limit=1)
                until_ms = newest[-1].at_ms if newest else 0
                since_ms = until_ms - length_s * 1000
                found = read_history(tx, settings.policy, since_ms, until_ms, where)
        finally:
            store.close()
    until = datetime.fromtimestamp(until_ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M")
    first: Note = ("history", {"days": length_s / 86_400, "until": until})
    return msgspec.structs.replace(found, notes=(first, *found.notes))


def _hand_out(comparison: Comparison, asked: Asked, called: str) -> None:
    """Print, and write what was asked for."""
    written = write_csv(asked.csv_dir, comparison) if asked.csv_dir else []
    if asked.report_file:
        made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        heading = Heading(command=called, made=made)
        write_text(asked.report_file, report(comparison, heading, asked.lang))
        written.append(asked.report_file)
    if asked.as_json:
        click.echo(json.dumps(_as_json(comparison)))
        return
    show(comparison, asked.lang)
    tell_facts(comparison, asked.lang)
    for path in written:
        click.echo(word("written", asked.lang, path=path), err=True)


def _as_json(comparison: Comparison) -> dict[str, object]:
    rows = comparison.rows
    found: dict[str, object] = {
        "rejected": comparison.trace.rejected,
        "unfit": {row.case.name: row.case.trace.unfit for row in rows},
        "policies": {row.case.name: row.flat() for row in rows},
    }
    if comparison.runs.engine:
        found["violations"] = {row.case.name: row.violations for row in rows}
    return found
