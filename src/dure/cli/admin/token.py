"""`dure admin token`."""

from __future__ import annotations

import click

from dure import wire
from dure.cli.admin.merging import checked
from dure.cli.app import App, confirm, pass_app
from dure.cli.exits import note
from dure.cli.output import Column, DataCommand, Output, data_options, when
from dure.cli.texts import say

_COLUMNS = [
    Column("id", lambda t: t.id),
    Column("user", lambda t: t.user),
    Column("label", lambda t: t.label, flex=True),
    Column("created", lambda t: when(t.created_ms)),
    Column("expires", lambda t: when(t.expires_ms)),
    Column("last_used", lambda t: when(t.last_used_ms)),
]


@click.command("ls", cls=DataCommand)
@data_options(wire.TokenOut)
@pass_app
def ls_(app: App, out: Output) -> None:
    """List your tokens; secrets are never shown again."""
    out.rows(app.client.tokens(), _COLUMNS, lambda t: t.id)


@click.command("new", cls=DataCommand)
@click.option("--label", default="", metavar="TEXT", help="what it is for")
@click.option("--user", metavar="USER", help="for another user (administrators)")
@click.option("--days", type=click.IntRange(1, 3650), default=90, help="days until it expires")
@data_options(wire.TokenOut)
@pass_app
def new_(app: App, label: str, user: str | None, days: int, out: Output) -> None:
    """Make a token and print it, this once, on stdout."""
    asked = checked({"label": label, "user": user, "days": days}, wire.TokenIn)
    made = app.client.new_token(asked)
    if out.json:
        out.result([made], single=True)
        return
    if not out.quiet:
        note(say("token_once"))
    click.echo(made.secret or "")


@click.command("rm")
@click.argument("token_id", metavar="ID")
@click.option("-y", "--yes", is_flag=True, help="do not ask")
@pass_app
def rm_(app: App, token_id: str, yes: bool) -> None:
    """Make token ID invalid at once."""
    what = say("what_token")
    confirm(say("confirm_remove", what=what, name=token_id), yes=yes)
    app.client.remove_token(token_id)
    note(say("removed", what=what, name=token_id))
