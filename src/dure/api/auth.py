"""Who asks: opaque bearer tokens, and what a route asks of its caller."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from dure.core.errors import DureError, ErrorCode
from dure.core.model import Role, User
from dure.engine import admin
from dure.engine.engine import Engine

LONGEST_TOKEN = 200


class Access(StrEnum):
    """Who may call a route at all; what they may see there, the use case decides."""

    ANYBODY = "anybody"
    MEMBER = "member"
    ADMIN = "admin"


class Caller(msgspec.Struct, frozen=True):
    """A signed-in person, and the key under which their requests are counted."""

    user: User
    key: str


def bearer(header: str) -> str:
    """Take the token out of an Authorization header; empty if there is none."""
    scheme, _, token = header.strip().partition(" ")
    token = token.strip()
    usable = scheme.lower() == "bearer" and token.isascii() and len(token) <= LONGEST_TOKEN
    return token if usable else ""


def identify(engine: Engine, header: str) -> Caller:
    """Find the person a token belongs to; else UNAUTHENTICATED."""
    token = bearer(header)
    if not token:
        raise DureError(ErrorCode.UNAUTHENTICATED)
    return Caller(user=admin.authenticate(engine, token), key=admin.digest(token)[:16])


def permit(caller: Caller, access: Access, action: str) -> None:
    """Refuse members what only administrators may do."""
    if access is Access.ADMIN and caller.user.role is not Role.ADMIN:
        raise DureError(ErrorCode.FORBIDDEN, action=action)
