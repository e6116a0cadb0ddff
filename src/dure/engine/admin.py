"""What administrators change: tiers, nodes, labs, users, tokens, maintenance."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable

import msgspec

from dure.core.errors import DureError, ErrorCode
from dure.core.events import Event, EventName
from dure.core.fairshare import check_weight
from dure.core.model import (
    ACTIVE,
    MICRO_PER_TFLOP_S,
    JobId,
    Lab,
    LabId,
    LedgerEntry,
    LedgerKind,
    Limits,
    Node,
    NodeId,
    Phase,
    PlacementId,
    Role,
    Tier,
    TierId,
    User,
    UserId,
)
from dure.engine.engine import Engine
from dure.engine.work import Work
from dure.ports import Ids, LeaseKey, Reads, StopKind, Token

TOKEN_PREFIX = "dure_pat_"  # noqa: S105 - a prefix, not a secret
DAY_MS = 86_400_000


def unchecked(_: object) -> None:
    """Accept whatever is stored now; an API edit compares it with what its author saw."""


def put_tier(
    engine: Engine,
    actor: str,
    tier: Tier,
    check: Callable[[Tier | None], None] = unchecked,
) -> Tier:
    """Add or change a tier; charges of what runs keep the rate of their dispatch."""
    with engine.change("admin", actor) as work:
        check(find_tier(work.tx, tier.name))
        work.tx.put_tier(tier)
        work.emit(
            Event(
                name=EventName.TIER_CHANGED,
                at_ms=work.now_ms,
                actor=actor,
                tier_id=tier.name,
                tier=tier,
            )
        )
    return tier


def remove_tier(
    engine: Engine,
    actor: str,
    name: TierId,
    check: Callable[[Tier | None], None] = unchecked,
) -> None:
    """Remove a tier that no node has; else IN_USE (deactivate it instead)."""
    with engine.change("admin", actor) as work:
        old = find_tier(work.tx, name)
        if old is None:
            raise DureError(ErrorCode.NOT_FOUND, kind="tier", id=name)
        check(old)
        if any(g.tier == name for n in work.tx.nodes() for g in n.gpus):
            raise DureError(ErrorCode.IN_USE, kind="tier", id=name)
        work.tx.remove_tier(name)
        work.emit(Event(name=EventName.TIER_REMOVED, at_ms=work.now_ms, actor=actor, tier_id=name))


def put_node(engine: Engine, actor: str, node: Node) -> None:
    """Register a node, or take over what its backend says it is now."""
    with engine.change("admin", actor) as work:
        old = find_node(work.tx, node.name)
        if old is not None:
            reason = old.drain_reason if old.drained else node.drain_reason
            node = msgspec.structs.replace(node, drained=old.drained, drain_reason=reason)
        if node != old:
            _keep_node(work, node)


def find_tier(tx: Reads, name: str) -> Tier | None:
    """A tier by name."""
    return next((t for t in tx.tiers() if t.name == name), None)


def find_node(tx: Reads, name: str) -> Node | None:
    """A node by name."""
    return next((n for n in tx.nodes() if n.name == name), None)


def _keep_node(work: Work, node: Node) -> None:
    work.tx.put_node(node)
    work.emit(
        Event(
            name=EventName.NODE_CHANGED,
            at_ms=work.now_ms,
            actor=work.actor,
            node_id=node.name,
            node=node,
        )
    )


def drain(
    engine: Engine,
    actor: str,
    name: NodeId,
    *,
    drained: bool,
    reason: str,
    force: bool = False,
    check: Callable[[Node | None], None] = unchecked,
) -> Node:
    """Take a node out of service or back; `force` also stops what runs there (policy 5)."""
    stopped: list[LeaseKey] = []
    with engine.change("admin", actor) as work:
        node = find_node(work.tx, name)
        if node is None:
            raise DureError(ErrorCode.NOT_FOUND, kind="node", id=name)
        check(node)
        node = msgspec.structs.replace(
            node, drained=drained, drain_reason=reason if drained else ""
        )
        _keep_node(work, node)
        if force and drained:
            stopped = _ask_drain(work, name)
    for key in stopped:
        engine.send_stop(key, name, StopKind.DRAIN)
    return node


def _ask_drain(work: Work, name: NodeId) -> list[LeaseKey]:
    """Write down that what runs on the node has to go; asked again after a crash."""
    keys = []
    for attempt in work.tx.open_attempts():
        job = work.job(attempt.job)
        running = job is not None and job.state in ACTIVE and job.epoch == attempt.epoch
        if attempt.placement.node == name and running and not attempt.stop:
            work.put_attempt(
                msgspec.structs.replace(attempt, stop=StopKind.DRAIN.value, stop_ms=work.now_ms)
            )
            keys.append(LeaseKey(job=attempt.job, epoch=attempt.epoch))
    return keys


def put_lab(
    engine: Engine,
    actor: str,
    name: LabId,
    *,
    title: str = "",
    weight: float = 1.0,
    limits: Limits | None = None,
    opening_tflop_s: float = 0,
    check: Callable[[Lab | None], None] = unchecked,
) -> Lab:
    """Add or change a lab. `opening_tflop_s` books use from before Dure, on top."""
    check_weight(weight)
    if not math.isfinite(opening_tflop_s) or opening_tflop_s < 0:
        raise DureError(ErrorCode.INVALID_REQUEST, field="opening_tflop_s", problem="positive")
    with engine.change("admin", actor) as work:
        known = work.tx.lab(name)
        check(known)
        old = known or Lab(name=name)
        lab = msgspec.structs.replace(old, title=title, weight=weight, limits=limits or Limits())
        work.tx.put_lab(lab)
        work.emit(
            Event(
                name=EventName.LAB_CHANGED,
                at_ms=work.now_ms,
                actor=actor,
                lab_id=name,
                lab=lab,
            )
        )
        if opening_tflop_s > 0:
            work.book([_opening(work, lab, round(opening_tflop_s * MICRO_PER_TFLOP_S))])
            work.promote([])
    with engine.store.read() as tx:
        return tx.lab(name) or lab


def _opening(work: Work, lab: Lab, cost_micro: int) -> LedgerEntry:
    """A ledger line that is no job's: job 0, numbered over all openings."""
    earlier = work.tx.ledger(job=JobId(0))
    return LedgerEntry(
        job=JobId(0),
        epoch=0,
        kind=LedgerKind.OPENING,
        segment=len(earlier),
        lab=lab.name,
        user=UserId(work.actor),
        placement=PlacementId(node=NodeId(""), tier=TierId("")),
        gpus=1,
        from_ms=0,
        to_ms=cost_micro,
        mtflops=1,
        booked_ms=work.now_ms,
    )


def put_user(
    engine: Engine,
    actor: str,
    user: User,
    check: Callable[[User | None], None] = unchecked,
) -> User:
    """Add or change a user; past charges stay with the lab they were booked on."""
    with engine.change("admin", actor) as work:
        if work.tx.lab(user.lab) is None:
            raise DureError(ErrorCode.NOT_FOUND, kind="lab", id=user.lab)
        old = work.tx.user(user.name)
        check(old)
        user = _with_unix_user(work, user, old, engine.policy.first_unix_uid)
        work.tx.put_user(user)
        work.emit(
            Event(
                name=EventName.USER_CHANGED,
                at_ms=work.now_ms,
                actor=actor,
                user=user.name,
                lab_id=user.lab,
            )
        )
        work.promote([user.name])
    return user


def _with_unix_user(work: Work, user: User, old: User | None, first: int) -> User:
    """The user with the Unix user that was asked for, had before, or comes next."""
    uid = user.unix_uid or (old.unix_uid if old is not None else 0)
    taken = {other.unix_uid for other in work.tx.users() if other.name != user.name}
    if uid and uid in taken:
        # Two people under one Unix user could read each other's outputs.
        raise DureError(ErrorCode.IN_USE, kind="unix_uid", id=uid)
    if not uid and first:
        uid = next(n for n in itertools.count(first) if n not in taken)
    return msgspec.structs.replace(user, unix_uid=uid)


def set_phase(engine: Engine, actor: str, phase: Phase) -> Phase:
    """Begin maintenance (NORMAL to DRAINING), end or abort it (anything to NORMAL)."""
    with engine.change("admin", actor) as work:
        now = work.tx.phase()
        if phase is now:
            return phase
        if phase is not Phase.NORMAL and not (now is Phase.NORMAL and phase is Phase.DRAINING):
            raise DureError(
                ErrorCode.WRONG_STATE, id=0, state=now.value, action=f"enter {phase.value}"
            )
        work.tx.put_phase(phase)
        work.emit(
            Event(name=EventName.MAINTENANCE_CHANGED, at_ms=work.now_ms, actor=actor, phase=phase)
        )
    return phase


# -- tokens --------------------------------------------------------------------------


class NewToken(msgspec.Struct, frozen=True):
    """A token and its secret, which exists only here and with its owner."""

    token: Token
    secret: str


def make_token(
    engine: Engine, ids: Ids, user: UserId, label: str, days: int = 90, secret: str = ""
) -> NewToken:
    """Make an API token; only its SHA-256 is stored."""
    secret = secret or TOKEN_PREFIX + ids.token()
    with engine.change("admin") as work:
        if work.tx.user(user) is None:
            raise DureError(ErrorCode.NOT_FOUND, kind="user", id=user)
        token = Token(
            digest=digest(secret),
            user=user,
            label=label,
            created_ms=work.now_ms,
            expires_ms=work.now_ms + days * DAY_MS,
        )
        work.tx.put_token(token)
    return NewToken(token, secret)


def digest(secret: str) -> str:
    """What is stored of a token: a lookup by hash leaks nothing about the secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def authenticate(engine: Engine, secret: str) -> User:
    """The active user a token belongs to; else UNAUTHENTICATED."""
    with engine.store.read() as tx:
        token = tx.token(digest(secret))
        user = tx.user(token.user) if token is not None else None
    now_ms = engine.clock.now_ms()
    if token is None or user is None or not user.active or token.expires_ms <= now_ms:
        raise DureError(ErrorCode.UNAUTHENTICATED)
    if now_ms - token.last_used_ms > 3_600_000:
        # Once an hour is enough to find forgotten tokens, and spares a write a request.
        with engine.store.write() as tx:
            # Read again: one that was revoked meanwhile must not come back to life.
            if (fresh := tx.token(token.digest)) is not None:
                tx.put_token(msgspec.structs.replace(fresh, last_used_ms=now_ms))
    return user


def revoke_token(engine: Engine, actor: User, token_id: str) -> None:
    """Forget one of the actor's own tokens (an administrator: anybody's)."""
    with engine.store.write() as tx:
        owners = [u.name for u in tx.users()] if actor.role is Role.ADMIN else [actor.name]
        mine = [t for o in owners for t in tx.tokens(o) if t.digest.startswith(token_id)]
        if len(mine) != 1 or len(token_id) < 8:
            raise DureError(ErrorCode.NOT_FOUND, kind="token", id=token_id)
        tx.remove_token(mine[0].digest)


def bootstrap(engine: Engine, admin: str, lab: str) -> bool:
    """Make the first administrator on an empty store; False if there are users already."""
    with engine.change("admin", "server") as work:
        if work.tx.users():
            return False
        work.tx.put_lab(Lab(name=LabId(lab)))
        user = User(name=UserId(admin), lab=LabId(lab), role=Role.ADMIN)
        work.tx.put_user(_with_unix_user(work, user, None, engine.policy.first_unix_uid))
        work.emit(
            Event(
                name=EventName.LAB_CHANGED,
                at_ms=work.now_ms,
                lab_id=LabId(lab),
                lab=Lab(name=LabId(lab)),
            )
        )
    return True
