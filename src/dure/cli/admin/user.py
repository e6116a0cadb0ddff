"""`dure admin user`."""

from __future__ import annotations

from typing import Any

import click

from dure import wire
from dure.cli.admin.merging import checked, existing, limit_options, limits, limits_text, merged
from dure.cli.app import App, pass_app
from dure.cli.exits import note
from dure.cli.output import Column, DataCommand, Output, data_options, yes_no
from dure.cli.texts import say

_COLUMNS = [
    Column("user", lambda u: u.name),
    Column("lab", lambda u: u.lab),
    Column("role", lambda u: u.role.value),
    Column("active", lambda u: yes_no(u.active)),
    Column("slots", lambda u: f"{u.slots_used}/{u.slots_limit}", right=True),
    Column("limits", lambda u: limits_text(u.limits), flex=True),
]


@click.command("ls", cls=DataCommand)
@data_options(wire.UserOut)
@pass_app
def ls_(app: App, out: Output) -> None:
    """List users."""
    out.rows(app.client.users(), _COLUMNS, lambda u: u.name)


@click.command("set", cls=DataCommand)
@click.argument("name")
@click.option("--lab", metavar="LAB", help="lab; past charges stay where they were")
@click.option("--role", type=click.Choice(["member", "admin"]), help="what they may do")
@click.option("--active/--inactive", default=None, help="whether they may sign in")
@click.option("--unix-uid", type=int, metavar="UID", help="Unix user their jobs run as")
@limit_options
@data_options(wire.UserOut)
@pass_app
def set_(app: App, /, name: str, out: Output, **given: Any) -> None:
    """Make user NAME, or change what is given."""
    old = existing(lambda: app.client.user(name))
    if old is None and given["lab"] is None:
        raise click.UsageError(say("user_needs"))
    narrowed = limits(old.limits if old else None, given)
    fields = merged(old, given | {"limits": narrowed}, wire.UserIn)
    saved = app.client.put_user(name, checked(fields, wire.UserIn))
    if not out.quiet:
        note(say("saved", what=say("what_user"), name=name))
    out.result([saved], single=True)
