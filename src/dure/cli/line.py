"""`dure queue` and `dure why`: the line, and the reason of one job."""

from __future__ import annotations

import click

from dure import wire
from dure.cli.app import App, pass_app
from dure.cli.exits import clean, note
from dure.cli.output import (
    Column,
    DataCommand,
    Output,
    data_options,
    gpus,
    on_terminal,
    show_table,
    when,
)
from dure.cli.refs import JobRef, resolve_one
from dure.cli.texts import say
from dure.core.messages import duration
from dure.core.model import Phase


@click.command(cls=DataCommand)
@click.option("--mine", is_flag=True, help="my jobs only")
@click.option("--lab", metavar="LAB", help="jobs of one lab")
@click.option("--all", "everything", is_flag=True, help="the whole line, not its first 50")
@click.option("--personal", is_flag=True, help="my jobs that have no slot yet, in my order")
@data_options()
@pass_app
def queue(
    app: App, mine: bool, lab: str | None, everything: bool, personal: bool, out: Output
) -> None:
    """Show who waits, in the order the scheduler uses, and why."""
    if personal:
        _personal(app, out.of(wire.PersonalRow))
        return
    out.of(wire.QueueRow)
    me = app.client.me().user if mine else None
    whole = everything or mine or lab is not None
    line = app.client.queue(None if whole else 50)
    rows = [r for r in line.items if me in {None, r.user} and lab in {None, r.lab}]
    lang = app.language
    columns = [
        Column("rank", lambda r: "–" if r.rank is None else str(r.rank), right=True),
        Column("job", lambda r: str(r.job), right=True),
        Column("name", lambda r: r.name, flex=True),
        Column("lab", lambda r: r.lab),
        Column("user", lambda r: r.user),
        Column("gpu", lambda r: gpus(r.num_gpus, r.min_vram_gb, r.tiers)),
        Column("wait", lambda r: duration(r.waited_s, lang), right=True),
        Column("eta", lambda r: _eta(r, line.as_of_ms, lang), right=True),
        Column("reason", _reason, flex=True),
    ]
    out.rows(rows, columns, lambda r: r.job)
    if not (out.json or out.quiet):
        _foot(line, len(rows))


def _eta(row: wire.QueueRow, as_of_ms: int, lang: str) -> str:
    """The median; the band stands in `dure why`."""
    if row.eta is None or row.eta.p50_ms is None:
        return ""
    return "~" + duration(max(0, row.eta.p50_ms - as_of_ms) / 1000, lang)


def _reason(row: wire.QueueRow) -> str:
    return row.reason.text


def _foot(line: wire.QueueOut, shown: int) -> None:
    if line.phase is not Phase.NORMAL:
        note(say("queue_phase", phase=line.phase.value))
    waiting = sum(lab.waiting for lab in line.labs)
    if not shown and not waiting:
        note(say("only_personal" if line.personal else "nothing_waits", personal=line.personal))
    elif on_terminal():
        counts = {"personal": line.personal, "node_wait": line.node_wait}
        note(say("queue_foot", shown=shown, waiting=max(waiting, shown), **counts))


def _personal(app: App, out: Output) -> None:
    queue = app.client.personal_queue()
    columns = [
        Column("job", lambda r: str(r.job), right=True),
        Column("name", lambda r: r.name, flex=True),
        Column("gpu", lambda r: str(r.num_gpus), right=True),
        Column("reason", lambda r: r.reason.text, flex=True),
    ]
    out.rows(queue.items, columns, lambda r: r.job)
    if not (out.json or out.quiet):
        note(say("preview_slots", used=queue.slots_used, limit=queue.slots_limit))


@click.command(cls=DataCommand)
@click.argument("job", type=JobRef())
@data_options(wire.WhyOut)
@pass_app
def why(app: App, job: str, out: Output) -> None:
    """Say why JOB waits: the reason, its rank, who is ahead, and where it could run."""
    seen = app.client.why(resolve_one(app.client, job))
    pairs = [
        ("job", str(seen.job)),
        ("state", seen.state_text),
        ("rank", "" if seen.rank is None else str(seen.rank)),
        ("reason", seen.reason.text if seen.reason else say("ended_state")),
        *[("reason", more.text) for more in seen.more],
        ("ahead", ", ".join(seen.ahead_labs)),
        ("eta", seen.eta.text if seen.eta else ""),
        *[("sooner", hint.text) for hint in seen.sooner],
        *[("moved", change.text) for change in seen.changes],
    ]
    out.one(seen, pairs, seen.reason.code if seen.reason else seen.state.value)
    if out.json or out.quiet or not seen.placements:
        return
    columns = [
        Column("node", lambda p: p.node),
        Column("tier", lambda p: p.tier),
        Column("idle", lambda p: f"{p.idle}/{p.capacity}", right=True),
        Column("fits", lambda p: "✓" if p.fits and p.in_service else "–"),
        Column("free_at", lambda p: when(p.free_at_ms), right=True),
        Column("lacks", lambda p: p.lacks, flex=True),
    ]
    click.echo("")
    cells = [[clean(c.cell(p)) for c in columns] for p in seen.placements]
    show_table(columns, cells, header=out.header)
