"""Routes of people: labs, users, tokens, the account."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dure import __version__, wire
from dure.api.auth import Access
from dure.api.caching import edit_tag
from dure.api.jobs import Cursor, next_link
from dure.api.pool import EDIT
from dure.api.routing import Call, Reply, Routes
from dure.core.errors import DureError, ErrorCode
from dure.core.model import LabId, Limits, Role, User, UserId
from dure.engine import admin, queries, render

C = ErrorCode
routes = Routes("people")


@routes.add("GET", "/v1/me", wire.MeOut)
def show_me(call: Call) -> Reply:
    """Say who the token belongs to."""
    me = call.actor
    return Reply(wire.MeOut(user=me.name, lab=me.lab, role=me.role, server_version=__version__))


def _limits(given: wire.LimitsIn) -> Limits:
    return msgspec.convert(given, Limits, from_attributes=True)


# -- labs ----------------------------------------------------------------------------


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of an account to show."""

    since_ms: wire.TimeMs = 0
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200
    cursor: Cursor | None = None


@routes.add("GET", "/v1/labs", wire.LabList)
def list_labs(call: Call) -> Reply:
    """List all labs, least used first."""
    return Reply(queries.labs(call.engine), stamp=queries.usage_stamp(call.engine))


@routes.add("GET", "/v1/labs/{lab}", wire.LabOut, refuses=(C.NOT_FOUND,))
def show_lab(call: Call, lab: str) -> Reply:
    """Show one lab with its decayed use of now."""
    found, out = queries.lab(call.engine, LabId(lab))
    return Reply(out, edit=edit_tag(found))


@routes.add("PUT", "/v1/labs/{lab}", wire.LabOut, access=Access.ADMIN, refuses=EDIT, edits=True)
def put_lab(call: Call, lab: str, body: wire.LabIn) -> Reply:
    """Add or change a lab."""
    admin.put_lab(
        call.engine,
        call.actor.name,
        LabId(lab),
        title=body.title,
        weight=body.weight,
        limits=_limits(body.limits),
        opening_tflop_s=body.opening_tflop_s,
        check=call.expectation.check,
    )
    return show_lab(call, lab)


@routes.add("GET", "/v1/labs/{lab}/usage", wire.UsageOut, refuses=(C.FORBIDDEN, C.NOT_FOUND))
def show_usage(call: Call, lab: str, query: UsageQuery) -> Reply:
    """Show a lab's account: decayed use, and the lines that made it, newest first."""
    out = queries.usage(
        call.engine, call.actor, LabId(lab), query.since_ms, query.limit, query.cursor
    )
    pairs = [("since_ms", str(query.since_ms)), ("limit", str(query.limit))]
    return Reply(
        out,
        headers=next_link(f"/v1/labs/{lab}/usage", out.next, pairs),
        stamp=queries.usage_stamp(call.engine),
    )


# -- users ---------------------------------------------------------------------------


@routes.add("GET", "/v1/users", wire.UserList)
def list_users(call: Call) -> Reply:
    """List everybody to an administrator, the own lab to a member."""
    return Reply(queries.users(call.engine, call.actor))


@routes.add("GET", "/v1/users/{user}", wire.UserOut, refuses=(C.FORBIDDEN, C.NOT_FOUND))
def show_user(call: Call, user: str) -> Reply:
    """Show one person."""
    found, out = queries.user(call.engine, call.actor, UserId(user))
    return Reply(out, edit=edit_tag(found))


@routes.add(
    "PUT",
    "/v1/users/{user}",
    wire.UserOut,
    access=Access.ADMIN,
    refuses=(C.NOT_FOUND, C.IN_USE, *EDIT),
    edits=True,
)
def put_user(call: Call, user: str, body: wire.UserIn) -> Reply:
    """Add or change a person; past charges stay with the lab they were booked on."""
    new = User(
        name=UserId(user),
        lab=LabId(body.lab),
        role=body.role,
        active=body.active,
        limits=_limits(body.limits),
        unix_uid=body.unix_uid or 0,
    )
    admin.put_user(call.engine, call.actor.name, new, call.expectation.check)
    found, out = queries.user(call.engine, call.actor, new.name)
    return Reply(out, edit=edit_tag(found))


# -- tokens --------------------------------------------------------------------------


@routes.add("GET", "/v1/tokens", wire.TokenList)
def list_tokens(call: Call) -> Reply:
    """List the caller's tokens, without their secrets."""
    return Reply(queries.tokens(call.engine, call.actor))


@routes.add("POST", "/v1/tokens", wire.TokenOut, status=201, refuses=(C.FORBIDDEN, C.NOT_FOUND))
def make_token(call: Call, body: wire.TokenIn) -> Reply:
    """Make a token; its secret is shown this once."""
    owner = UserId(body.user) if body.user is not None else call.actor.name
    if owner != call.actor.name and call.actor.role is not Role.ADMIN:
        raise DureError(C.FORBIDDEN, action="make_token", id=owner)
    made = admin.make_token(call.engine, call.api.ids, owner, body.label, body.days)
    return Reply(render.token_out(made.token, made.secret))


@routes.add("DELETE", "/v1/tokens/{token}", None, status=204, refuses=(C.NOT_FOUND,))
def revoke_token(call: Call, token: str) -> Reply:
    """Revoke one of the caller's tokens (an administrator: anybody's), at once."""
    admin.revoke_token(call.engine, call.actor, token)
    return Reply()
