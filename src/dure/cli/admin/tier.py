"""`dure admin tier`."""

from __future__ import annotations

import click

from dure import wire
from dure.cli.admin.merging import checked, existing, merged
from dure.cli.app import App, confirm, pass_app
from dure.cli.exits import note
from dure.cli.output import Column, DataCommand, Output, data_options, yes_no
from dure.cli.refs import TierRef
from dure.cli.texts import say

_COLUMNS = [
    Column("tier", lambda t: t.name),
    Column("vram", lambda t: f"{t.vram_gb:g}G", right=True),
    Column("tflops", lambda t: f"{t.tflops:g}", right=True),
    Column("max_gpus", lambda t: str(t.max_gpus), right=True),
    Column("order", lambda t: str(t.sort_order), right=True),
    Column("active", lambda t: yes_no(t.active)),
]


@click.command("ls", cls=DataCommand)
@data_options(wire.TierOut)
@pass_app
def ls_(app: App, out: Output) -> None:
    """List tiers, best first."""
    out.rows(app.client.tiers(), _COLUMNS, lambda t: t.name)


@click.command("set", cls=DataCommand)
@click.argument("name", type=TierRef())
@click.option("--vram-gb", type=float, help="memory of one GPU")
@click.option("--tflops", type=float, help="charge rate")
@click.option("--order", "sort_order", type=int, help="higher is better and comes first")
@click.option("--max-gpus", type=click.IntRange(1, 8), help="most GPUs a job may have")
@click.option("--active/--inactive", default=None, help="whether jobs may use it")
@data_options(wire.TierOut)
@pass_app
def set_(app: App, /, name: str, out: Output, **given: float | bool | None) -> None:
    """Make tier NAME, or change what is given."""
    old = existing(lambda: app.client.tier(name))
    if old is None and (given["vram_gb"] is None or given["tflops"] is None):
        raise click.UsageError(say("tier_needs"))
    fields = merged(old, given, wire.TierIn)
    saved = app.client.put_tier(name, checked(fields, wire.TierIn))
    if not out.quiet:
        note(say("saved", what=say("what_tier"), name=name))
    out.result([saved], single=True)


@click.command("rm")
@click.argument("name", type=TierRef())
@click.option("-y", "--yes", is_flag=True, help="do not ask")
@pass_app
def rm_(app: App, name: str, yes: bool) -> None:
    """Remove tier NAME; refused while a node has it."""
    what = say("what_tier")
    confirm(say("confirm_remove", what=what, name=name), yes=yes)
    app.client.remove_tier(name)
    note(say("removed", what=what, name=name))
