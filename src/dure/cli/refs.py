"""Which jobs a word means: `4140`, `12-15`, `@last`, or a name (the newest of mine)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from dure.cli.app import leave
from dure.cli.exits import Exit, note
from dure.cli.texts import say
from dure.client import Client, ClientError

_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")
_NUMBER = re.compile(r"\d{1,18}")
LONGEST_RANGE = 1000

if TYPE_CHECKING:
    _Word = click.ParamType[str]
else:
    _Word = click.ParamType


def resolve(client: Client, refs: Sequence[str]) -> list[int]:
    """Numbers of the jobs, in the order named and each once; exit 3 when a name is unknown."""
    found: list[int] = []
    for ref in refs:
        found += _one(client, ref)
    return list(dict.fromkeys(found))


def resolve_one(client: Client, ref: str) -> int:
    """Return the number of one job."""
    numbers = _one(client, ref)
    if len(numbers) != 1:
        raise click.UsageError(say("one_job", ref=ref))
    return numbers[0]


def _one(client: Client, ref: str) -> list[int]:
    if _NUMBER.fullmatch(ref):
        return [int(ref)]
    if span := _RANGE.fullmatch(ref):
        return _span(ref, int(span[1]), int(span[2]))
    if ref == "@last":
        newest = client.jobs(mine=True, limit=1)
        if not newest:
            note("✗ " + say("no_last"))
            leave(Exit.NOT_FOUND)
        return [newest[0].id]
    named = [j.id for j in client.jobs(mine=True, name=ref, limit=50) if j.info.name == ref]
    if not named:
        note("✗ " + say("no_job", name=ref))
        leave(Exit.NOT_FOUND)
    return [max(named)]


def _span(ref: str, first: int, last: int) -> list[int]:
    if last < first:
        raise click.UsageError(say("bad_range", ref=ref))
    if last - first >= LONGEST_RANGE:
        raise click.UsageError(say("long_range", ref=ref, limit=LONGEST_RANGE))
    return list(range(first, last + 1))


class JobRef(_Word):
    """A job reference, completed from my newest jobs."""

    name = "job"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002 - click's signature
        incomplete: str,
    ) -> list[CompletionItem]:
        """Offer ids with name and state."""

        def look(client: Client) -> list[CompletionItem]:
            return [
                CompletionItem(str(j.id), help=f"{j.info.name} {j.state.value}")
                for j in client.jobs(mine=True, limit=50)
                if str(j.id).startswith(incomplete)
            ]

        return _looked_up(ctx, look)


class TierRef(_Word):
    """A tier's name, completed from the pool."""

    name = "tier"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002 - click's signature
        incomplete: str,
    ) -> list[CompletionItem]:
        """Offer the names of all tiers."""

        def look(client: Client) -> list[CompletionItem]:
            return [
                CompletionItem(t.name, help=f"{t.vram_gb:g} GB")
                for t in client.tiers()
                if t.name.startswith(incomplete)
            ]

        return _looked_up(ctx, look)


def _looked_up(
    ctx: click.Context, look: Callable[[Client], list[CompletionItem]]
) -> list[CompletionItem]:
    """Ask the server, briefly; a key press never shows an error."""
    root = ctx.find_root().params
    with (
        suppress(ClientError, OSError),
        Client(root.get("url"), profile=root.get("profile"), timeout_s=2, tries=1) as client,
    ):
        return look(client)
    return []
