"""`dure login` and `dure open`."""

from __future__ import annotations

import os
import sys

import click

from dure.cli.app import App, can_ask, pass_app
from dure.cli.exits import note
from dure.cli.output import on_terminal
from dure.cli.refs import JobRef, resolve_one
from dure.cli.texts import say
from dure.client import Client
from dure.client.config import DEFAULT_URL, Profile, clean_token, clean_url, load, save

_LOCAL = ("http://127.", "http://localhost", "http://[::1]", "https://")


@click.command()
@click.option("--url", metavar="URL", help="address of the server")
@click.option("--token-stdin", is_flag=True, help="read the token from stdin")
@click.option("--profile", metavar="NAME", help="name to save it under")
@pass_app
def login(app: App, url: str | None, token_stdin: bool, profile: str | None) -> None:
    """Ask for a token, check it, and save it where only you can read it."""
    name = profile or app.profile or load().default
    address = _address(url or app.url, name, ask=not token_stdin)
    if not address.startswith(_LOCAL):
        note(say("plain_http", url=address))
    token = _token(from_stdin=token_stdin)
    with Client(address, token, app.language) as client:
        me = client.me()
    where = save(name, Profile(url=address, token=token))
    note(say("signed_in", url=address, user=me.user, lab=me.lab, path=where))


def _address(given: str | None, name: str, *, ask: bool) -> str:
    known = load().profiles.get(name)
    default = given or os.environ.get("DURE_URL") or (known.url if known else DEFAULT_URL)
    if given is None and ask and can_ask():
        default = click.prompt(say("url_prompt"), default=default, err=True)
    return clean_url(default)


def _token(*, from_stdin: bool) -> str:
    if from_stdin:
        text = sys.stdin.readline()
    elif can_ask():
        text = click.prompt(say("token_prompt"), hide_input=True, err=True)
    else:
        raise click.UsageError(say("needs_stdin"))
    token = clean_token(text)
    if not token:
        raise click.UsageError(say("empty_token"))
    return token


@click.command("open")
@click.argument("job", required=False, type=JobRef())
@click.option("--print", "print_only", is_flag=True, help="only print the address")
@pass_app
def open_page(app: App, job: str | None, print_only: bool) -> None:
    """Print the console address of JOB (or of the pool); on a terminal, open it too."""
    client = app.client
    page = f"/jobs/{resolve_one(client, job)}" if job else "/pool"
    address = client.url + page
    click.echo(address)
    if on_terminal() and not print_only:
        click.launch(address)
