"""`dure admin lab`."""

from __future__ import annotations

from typing import Any

import click

from dure import wire
from dure.cli.admin.merging import checked, existing, limit_options, limits, limits_text, merged
from dure.cli.app import App, pass_app
from dure.cli.exits import note
from dure.cli.output import Column, DataCommand, Output, data_options
from dure.cli.texts import say
from dure.cli.usage import hours

_COLUMNS = [
    Column("lab", lambda item: item.name),
    Column("title", lambda item: item.title, flex=True),
    Column("weight", lambda item: f"{item.weight:g}", right=True),
    Column("members", lambda item: str(item.members), right=True),
    Column("hours", lambda item: hours(item.usage_tflop_s), right=True),
    Column("limits", lambda item: limits_text(item.limits), flex=True),
]


@click.command("ls", cls=DataCommand)
@data_options(wire.LabOut)
@pass_app
def ls_(app: App, out: Output) -> None:
    """List labs with weight and limits."""
    out.rows(app.client.labs(), _COLUMNS, lambda item: item.name)


@click.command("set", cls=DataCommand)
@click.argument("name")
@click.option("--title", help="full name")
@click.option("--weight", type=float, help="share beside other labs (1 is usual)")
@click.option("--add-opening", "opening_tflop_s", type=float, help="add use from before, TFLOP-s")
@limit_options
@data_options(wire.LabOut)
@pass_app
def set_(app: App, /, name: str, out: Output, **given: Any) -> None:
    """Make lab NAME, or change what is given."""
    old = existing(lambda: app.client.lab(name))
    narrowed = limits(old.limits if old else None, given)
    fields = merged(old, given | {"limits": narrowed}, wire.LabIn)
    saved = app.client.put_lab(name, checked(fields, wire.LabIn))
    if not out.quiet:
        note(say("saved", what=say("what_lab"), name=name))
    out.result([saved], single=True)
