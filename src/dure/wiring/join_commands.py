"""`dure agent invite` on the server and `dure agent join` on a node. Imported when called."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from dure.core.errors import DureError, ErrorCode
from dure.core.lease import QueueAway
from dure.settings import EdgeSettings, Settings
from dure.wiring.local_commands import config_option, read, refusals_in_words

SHARED = ("lease_ttl_s", "beat_s", "early_beat_s")
"""Settings that a node must have as its server has them."""


@config_option
@click.command()
@click.argument("node")
@click.option("--address", default="", metavar="HOST:PORT", help="of Redis, as the node sees it")
@click.option("--hours", type=click.IntRange(1, 168), default=1, help="how long it is valid")
def invite(config: Path | None, node: str, address: str, hours: int) -> None:
    """Let NODE join: make its account in Redis and print a secret that works once."""
    with refusals_in_words():
        settings = read(config)
        secret, kept = _invite(settings, node, address, hours * 3600)
    if not kept:
        click.echo(
            "Redis keeps no file of accounts: set `aclfile`, or a restart forgets this node.",
            err=True,
        )
    click.echo(f"On {node}, within {hours} h, as the account that jobs run under:", err=True)
    click.echo(f"dure agent join {secret}")


def _invite(settings: Settings, node: str, address: str, valid_s: int) -> tuple[str, bool]:
    from dure.adapters.lease import invite as door  # noqa: PLC0415 - needs the edge extra

    if not settings.edge.redis_url:
        raise _refusal("edge.redis_url", "is empty: there is no lease queue to join")
    if not door.NODE_NAME.fullmatch(node):
        raise _refusal("node.name", f"{node!r} is no node name (letters, digits, dot, dash)")
    standard = EdgeSettings()
    edge: dict[str, str | float] = {
        name: getattr(settings.edge, name)
        for name in SHARED
        if getattr(settings.edge, name) != getattr(standard, name)
    }
    try:
        return door.invite(
            settings.edge.redis_url,
            node,
            prefix=settings.edge.key_prefix,
            address=address,
            edge=edge,
            valid_s=valid_s,
        )
    except QueueAway as error:
        raise _refusal("edge.redis_url", f"Redis did not make the account: {error}") from error


@click.command()
@click.argument("secret")
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("dure.toml"),
    help="settings file to write",
)
def join(secret: str, config: Path) -> None:
    """Join with a SECRET of `dure agent invite`: writes this node's settings file."""
    with refusals_in_words():
        _join(secret, config)
    click.echo(f"wrote {config}. Next: dure agent run --config {config}")
    click.echo(f"or, as root: dure agent install --config {config}")


def _join(secret: str, config: Path) -> None:
    from dure.adapters.lease import invite as door  # noqa: PLC0415 - needs the edge extra

    try:
        # Before the secret is used up: it must not be lost to a file that cannot be written.
        file = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise _refusal(str(config), f"cannot be made: {error.strerror}") from error
    try:
        given = door.accept(secret)
        os.write(file, settings_text(given.node, given.redis_url, given.edge).encode())
    except (door.Gone, QueueAway) as error:
        config.unlink()
        used = "was used already, has expired, or is none; ask for a new one"
        why = used if isinstance(error, door.Gone) else f"could not be used: {error}"
        raise _refusal("secret", why) from error
    finally:
        os.close(file)


def settings_text(node: str, redis_url: str, edge: dict[str, str | float]) -> str:
    """A node's settings file."""
    lines = [f"[node]\nname = {json.dumps(node)}\n\n[edge]\nredis_url = {json.dumps(redis_url)}"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in edge.items()]
    return "\n".join(lines) + "\n"


def _refusal(key: str, value: str) -> DureError:
    return DureError(ErrorCode.BAD_SETTING, key=key, value=value)
