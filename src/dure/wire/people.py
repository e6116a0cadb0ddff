"""Labs, users, tokens and use."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from dure.core.model import Role
from dure.wire.fields import Code, In, Out, ShortText


class LimitsIn(In, frozen=True, kw_only=True):
    """Narrower limits; null narrows nothing."""

    slots: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    num_gpus: Annotated[int, Meta(ge=1, le=8)] | None = None
    waiting: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    max_time_limit_s: Annotated[int, Meta(ge=1, le=315_360_000)] | None = None


class LabIn(In, frozen=True, kw_only=True):
    """PUT /v1/labs/{name}. `opening_tflop_s` adds use from before Dure to the account."""

    title: ShortText = ""
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    limits: LimitsIn = LimitsIn()
    opening_tflop_s: Annotated[float, Meta(ge=0, le=1e18)] = 0


class LabOut(Out, frozen=True, kw_only=True):
    """A lab with its decayed usage of now."""

    name: str
    title: str
    weight: float
    usage_tflop_s: str
    members: int
    limits: LimitsIn


class LabList(Out, frozen=True, kw_only=True):
    """All labs, least used first."""

    items: list[LabOut]


UnixUid = Annotated[int, Meta(ge=1000, le=2_147_483_647)]
"""A person's own Unix user; below 1000 are the system's."""


class UserIn(In, frozen=True, kw_only=True):
    """PUT /v1/users/{name}."""

    lab: Code
    role: Role = Role.MEMBER
    active: bool = True
    limits: LimitsIn = LimitsIn()
    unix_uid: UnixUid | None = None


class UserOut(Out, frozen=True, kw_only=True):
    """A person."""

    name: str
    lab: str
    role: Role
    active: bool
    limits: LimitsIn
    slots_used: int
    slots_limit: int
    unix_uid: UnixUid | None = None


class UserList(Out, frozen=True, kw_only=True):
    """All users."""

    items: list[UserOut]


class TokenIn(In, frozen=True, kw_only=True):
    """POST /v1/tokens. An administrator may name another user."""

    label: ShortText = ""
    user: Code | None = None
    days: Annotated[int, Meta(ge=1, le=3650)] = 90


class TokenOut(Out, frozen=True, kw_only=True):
    """A token; `secret` is shown once, when it is made."""

    id: str
    user: str
    label: str
    created_ms: int
    expires_ms: int
    last_used_ms: int
    secret: str | None = None


class TokenList(Out, frozen=True, kw_only=True):
    """The caller's tokens."""

    items: list[TokenOut]


class LedgerLine(Out, frozen=True, kw_only=True):
    """One line of the account."""

    job: int
    epoch: int
    kind: str
    segment: int
    user: str
    node: str
    tier: str
    gpus: int
    from_ms: int
    to_ms: int
    cost_tflop_s: str
    booked_ms: int


class UsageOut(Out, frozen=True, kw_only=True):
    """GET /v1/labs/{name}/usage: decayed use, and the lines that made it."""

    lab: str
    as_of_ms: int
    usage_tflop_s: str
    charged_tflop_s: str
    run_tflop_s: str
    reserved_tflop_s: str
    opening_tflop_s: str
    lines: list[LedgerLine]
    next: str | None = None


class MeOut(Out, frozen=True, kw_only=True):
    """Who the token belongs to."""

    user: str
    lab: str
    role: Role
    server_version: str
