"""What every command shares: the client, the language, confirmations."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from dure.cli.exits import Exit, note
from dure.cli.texts import lang, say
from dure.client import Client
from dure.client.config import path, too_open
from dure.client.transport import Sent


class App:
    """Options of `dure` itself and the one client of this call."""

    def __init__(
        self, url: str | None = None, profile: str | None = None, *, verbose: bool = False
    ) -> None:
        self.url = url
        self.profile = profile
        self.verbose = verbose
        self.language = lang()
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """The client, made when first needed."""
        if self._client is None:
            if too_open():
                note(say("config_open", path=path()))
            self._client = Client(
                self.url,
                language=self.language,
                profile=self.profile,
                observe=_tell if self.verbose else None,
            )
        return self._client

    def close(self) -> None:
        """Give the connection back."""
        if self._client is not None:
            self._client.close()
            self._client = None


pass_app = click.make_pass_decorator(App, ensure=True)


def _tell(sent: Sent) -> None:
    again = f" (try {sent.attempt})" if sent.attempt > 1 else ""
    note(f"> {sent.method} {sent.path} {sent.outcome} {sent.took_s * 1000:.0f} ms{again}")


def can_ask() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is destroyed; without a terminal, --yes is needed."""
    if yes:
        return
    if not can_ask():
        raise click.UsageError(say("needs_yes"))
    if not click.confirm(question, err=True):
        note(say("declined"))
        leave(Exit.UNEXPECTED)


def leave(code: int) -> NoReturn:
    """End the command with an exit code."""
    raise click.exceptions.Exit(int(code))
