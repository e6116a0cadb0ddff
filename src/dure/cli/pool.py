"""`dure pool`: the first thing people type."""

from __future__ import annotations

import time
from collections import Counter

import click

from dure import wire
from dure.cli.app import App, pass_app
from dure.cli.exits import note
from dure.cli.output import Column, DataCommand, Output, data_options, on_terminal
from dure.cli.refs import TierRef
from dure.cli.texts import say
from dure.core.messages import duration

REFRESH_S = 5.0


@click.command(cls=DataCommand)
@click.argument("tier", required=False, type=TierRef())
@click.option("--nodes", is_flag=True, help="one line per node")
@click.option("-w", "--watch", is_flag=True, help="look again every 5 s")
@data_options()
@pass_app
def pool(app: App, tier: str | None, nodes: bool, watch: bool, out: Output) -> None:
    """Show what is free now, how much a job can get, and when more becomes free."""
    out.of(wire.NodeOut if nodes else wire.PoolTier)
    while True:
        seen = app.client.pool()
        if watch and on_terminal():
            click.clear()
        (_nodes if nodes else _tiers)(app, seen, tier, out)
        if not watch:
            return
        time.sleep(REFRESH_S)


def _tiers(app: App, seen: wire.PoolOut, only: str | None, out: Output) -> None:
    tiers = [t for t in seen.tiers if only in {None, t.name}]
    lang = app.language

    def next_free(t: wire.PoolTier) -> str:
        if t.idle:
            return say("now")
        if t.next_free_ms is None:
            return say("none")
        return say("free_in", after=duration((t.next_free_ms - seen.as_of_ms) / 1000, lang))

    columns = [
        Column("tier", lambda t: t.name + (f" {say('simulated')}" if t.simulated else "")),
        Column("vram", lambda t: f"{t.vram_gb:g}G", right=True),
        Column("run", lambda t: str(t.run), right=True),
        Column("reserved", lambda t: str(t.reserved), right=True),
        Column("idle", lambda t: str(t.idle), right=True),
        Column("down", lambda t: str(t.down), right=True),
        Column("start_now", _startable),
        Column("next_free", next_free),
    ]
    out.rows(tiers, columns, lambda t: t.name)
    if not tiers and not out.json and not out.quiet:
        note(say("no_gpus"))


def _startable(tier: wire.PoolTier) -> str:
    if not tier.start_now:
        return say("none")
    return say("startable", count=tier.start_now, most=tier.max_gpus)


def _nodes(app: App, seen: wire.PoolOut, only: str | None, out: Output) -> None:
    del app
    nodes = [n for n in seen.nodes if only is None or any(g.tier == only for g in n.gpus)]
    out.rows(nodes, node_columns(), lambda n: n.name)


def node_columns() -> list[Column]:
    """Columns of a list of nodes."""
    return [
        Column("node", lambda n: n.name + (f" {say('simulated')}" if n.simulated else "")),
        Column("health", lambda n: n.health.value.lower()),
        Column("drained", _drained, flex=True),
        Column("gpus", lambda n: ", ".join(f"{t} × {c}" for t, c in _tiers_of(n).items())),
        Column("run", lambda n: str(_count(n, "run") + _count(n, "ending")), right=True),
        Column("reserved", lambda n: str(_count(n, "reserved")), right=True),
        Column("idle", lambda n: str(_count(n, "idle")), right=True),
        Column("backend", lambda n: n.backend),
    ]


def _tiers_of(node: wire.NodeOut) -> Counter[str]:
    return Counter(g.tier for g in node.gpus)


def _count(node: wire.NodeOut, state: str) -> int:
    return sum(g.state == state for g in node.gpus)


def _drained(node: wire.NodeOut) -> str:
    if not node.drained:
        return node.drain_reason or say("none")  # what its backend says, e.g. Slurm
    return node.drain_reason or say("yes")
