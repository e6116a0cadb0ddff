"""`dure admin node`."""

from __future__ import annotations

import click

from dure import wire
from dure.cli.app import App, confirm, pass_app
from dure.cli.exits import note
from dure.cli.output import DataCommand, Output, data_options
from dure.cli.pool import node_columns
from dure.cli.texts import say


@click.command("ls", cls=DataCommand)
@data_options(wire.NodeOut)
@pass_app
def ls_(app: App, out: Output) -> None:
    """List nodes with health, drain and what their GPUs do."""
    out.rows(app.client.nodes(), node_columns(), lambda n: n.name)


@click.command("drain", cls=DataCommand)
@click.argument("name")
@click.option("--reason", default="", metavar="TEXT", help="shown to waiting users")
@click.option("--force", is_flag=True, help="also stop what runs there; it is queued again")
@click.option("-y", "--yes", is_flag=True, help="do not ask")
@data_options(wire.NodeOut)
@pass_app
def drain_(app: App, name: str, reason: str, force: bool, yes: bool, out: Output) -> None:
    """Let node NAME take no new jobs."""
    if force:
        confirm(say("confirm_force", name=name), yes=yes)
    patch = wire.NodePatch(drained=True, drain_reason=reason, force=force)
    saved = app.client.patch_node(name, patch)
    if not out.quiet:
        note(say("drained", name=name))
    out.result([saved], single=True)


@click.command("resume", cls=DataCommand)
@click.argument("name")
@data_options(wire.NodeOut)
@pass_app
def resume_(app: App, name: str, out: Output) -> None:
    """Put node NAME back to service."""
    saved = app.client.patch_node(name, wire.NodePatch(drained=False))
    if not out.quiet:
        note(say("resumed", name=name))
    out.result([saved], single=True)
