"""`dure api`: any request, as it is."""

from __future__ import annotations

import re
import sys

import click
import msgspec

from dure.cli.app import App, pass_app
from dure.cli.exits import note
from dure.cli.output import on_terminal
from dure.cli.texts import say

_PATH = re.compile(r"/[\x21-\x7e]*")


@click.command()
@click.argument(
    "method",
    type=click.Choice(["GET", "POST", "PUT", "PATCH", "DELETE"], case_sensitive=False),
)
@click.argument("path")
@click.option("-d", "--data", metavar="JSON|@FILE|@-", help="body: JSON, a file, or stdin")
@click.option("--if-match", metavar="ETAG", help="ETag of what is changed")
@click.option("--key", metavar="KEY", help="Idempotency-Key; makes a POST safe to repeat")
@click.option("-i", "--include", is_flag=True, help="status and headers on stderr")
@pass_app
def api(
    app: App,
    method: str,
    path: str,
    data: str | None,
    if_match: str | None,
    key: str | None,
    include: bool,
) -> None:
    """Send METHOD PATH (dure api GET /v1/pool) and print what comes back."""
    if not _PATH.fullmatch(path):
        raise click.UsageError(say("bad_path"))
    body = None if data is None else _json(data)
    reply = app.client.send(method.upper(), path, body, etag=if_match, key=key)
    if include:
        note(f"HTTP {reply.status}")
        for name, value in reply.headers.items():
            note(f"{name}: {value}")
    shown = reply.body
    if on_terminal() and "json" in reply.headers.get("content-type", ""):
        shown = msgspec.json.format(shown, indent=2)
    if shown:
        click.echo(shown.decode(errors="replace"), nl=not shown.endswith(b"\n"))


def _json(data: str) -> msgspec.Raw:
    """Check a body without changing it."""
    if data == "@-":
        text = sys.stdin.read()
    elif data.startswith("@"):
        with click.open_file(data[1:], encoding="utf-8") as file:
            text = file.read()
    else:
        text = data
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise click.UsageError(say("bad_body", detail=error)) from None
    return msgspec.Raw(text.encode())
