"""Letting a node in: an account of its own in Redis, handed over by a secret that works once.

The invitation's account may take one key and nothing else; who takes it has the node's own
password, and nobody can take it again.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec
import redis

from dure.core.lease import QueueAway

T = TypeVar("T")

COMMANDS = (
    "+eval +evalsha +blpop +lpop +time +hget +hmget +hset +hsetnx +hdel +hincrby +lrange +llen "
    "+lrem +lpush +rpush +zadd +zrem +sadd +set +del +pexpire +persist +incr +exists"
)
BEGIN = "resetchannels -@all +@connection -client +client|setname"
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What the one-time secret says: where to take the credentials, and as whom."""

    url: str
    key: str


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What a node gets for it; `edge` are the settings that it must share with the server."""

    node: str
    redis_url: str
    edge: dict[str, str | float]


class Gone(Exception):  # noqa: N818 - says what is so
    """The invitation was used already, has expired, or is none."""


def agent_rights(prefix: str, node: str) -> list[str]:
    """Keys and commands of a node's account; the how-to gives the same ones."""
    keys = ("task:*", "node:names", f"node:state:{node}", f"node:wake:{node}")
    return [*(f"~{prefix}{key}" for key in keys), *BEGIN.split(), *COMMANDS.split()]


def invite(
    url: str,
    node: str,
    *,
    prefix: str,
    address: str = "",
    edge: dict[str, str | float] | None = None,
    valid_s: int = 3600,
) -> tuple[str, bool]:
    """Make a node's account; the secret to join with, and whether Redis will remember it.

    `address` (host:port) replaces the server's own way to Redis where a node's differs.
    """
    assert NODE_NAME.fullmatch(node), "checked by the caller: a pattern must not slip in"
    own, once = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    key = f"{prefix}node:join:{node}"
    account, guest = f"dure-node-{node}", f"dure-join-{node}"
    given = Credentials(
        node=node,
        redis_url=_as(url, account, own, address),
        edge={"key_prefix": prefix, **(edge or {})},
    )

    def make(client: Any) -> bool:
        rights = agent_rights(prefix, node)
        client.execute_command("ACL", "SETUSER", account, "reset", "on", f">{own}", *rights)
        little = [f"~{key}", *BEGIN.split(), "+getdel"]
        client.execute_command("ACL", "SETUSER", guest, "reset", "on", f">{once}", *little)
        client.set(key, msgspec.json.encode(given), ex=valid_s)
        return _remember(client)

    kept = _ask(url, make)
    invitation = Invitation(url=_as(url, guest, once, address), key=key)
    return base64.urlsafe_b64encode(msgspec.json.encode(invitation)).decode(), kept


def accept(secret: str) -> Credentials:
    """Take the credentials; raises `Gone` when they are not there (any more)."""
    try:
        invitation = msgspec.json.decode(base64.urlsafe_b64decode(secret), type=Invitation)
    except (ValueError, msgspec.MsgspecError) as error:
        raise Gone from error

    def take(client: Any) -> object:
        return client.getdel(invitation.key)

    try:
        found = _ask(invitation.url, take)
    except QueueAway as error:
        if isinstance(error.__cause__, redis.exceptions.AuthenticationError):
            raise Gone from error  # a newer invitation has replaced this one
        raise
    if not isinstance(found, bytes):
        raise Gone
    return msgspec.json.decode(found, type=Credentials)


def _ask(url: str, step: Callable[[Any], T]) -> T:
    client = redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5)
    try:
        return step(client)
    except redis.exceptions.RedisError as error:
        raise QueueAway(str(error)) from error
    finally:
        client.close()


def _remember(client: Any) -> bool:
    """Write the accounts where Redis keeps them: its ACL file, or its own settings file."""
    for command in (("ACL", "SAVE"), ("CONFIG", "REWRITE")):
        try:
            client.execute_command(*command)
        except redis.exceptions.ResponseError:
            continue
        return True
    return False


def _as(url: str, account: str, password: str, address: str) -> str:
    """The same Redis by another account, and by another address if one is given."""
    parts = urlsplit(url)
    host = address or parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(account)}:{quote(password)}@{host}"))
