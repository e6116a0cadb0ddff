"""The read side: what API and console show, as wire structs in the reader's language.

Rules: `world.lock` is never held during store I/O. Members read the jobs of their own lab
in full; of others' only what the queue and the pool show.
"""

from __future__ import annotations

from collections import Counter
from heapq import nsmallest
from itertools import islice
from typing import Protocol, runtime_checkable

import msgspec

from dure import wire
from dure.core.errors import DureError, ErrorCode
from dure.core.explain import Slots, explain
from dure.core.model import (
    CHARGED,
    Attempt,
    Job,
    JobId,
    JobView,
    Lab,
    LabId,
    LedgerKind,
    Phase,
    Role,
    User,
    UserId,
)
from dure.engine import render
from dure.engine.engine import Engine
from dure.engine.world import slots_limit
from dure.ports import JobFilter, LeaseKey, Reads


@runtime_checkable
class _KeepsOutput(Protocol):
    def output_dir(self, key: LeaseKey) -> str | None: ...


# -- jobs ----------------------------------------------------------------------------


def may_see(actor: User, job: Job) -> bool:
    """Whether `actor` may read all of a job: their own, their lab's, or as administrator."""
    return actor.role is Role.ADMIN or job.user == actor.name or job.lab == actor.lab


def seen(tx: Reads, actor: User, job_id: JobId) -> Job:
    """Find a job that `actor` may read; else NOT_FOUND or FORBIDDEN."""
    found = tx.job(job_id)
    if found is None:
        raise DureError(ErrorCode.NOT_FOUND, kind="job", id=int(job_id))
    if not may_see(actor, found):
        raise DureError(ErrorCode.FORBIDDEN, action="read_job", id=int(job_id))
    return found


def job(engine: Engine, actor: User, lang: str, job_id: JobId) -> wire.JobOut:
    """Show one job with its charge, rank and output folder."""
    with engine.store.read() as tx:
        found = seen(tx, actor, job_id)
        attempt = _newest(tx, found)
        charge = render.charge_out(tx.ledger(job=found.id))
    with engine.world.lock:
        rank = engine.world.index.rank(found.id, engine.world.pool)
    return render.job_out(
        found,
        attempt,
        lang,
        engine.clock.now_ms(),
        engine.policy,
        charge=charge,
        output_dir=_output_dir(engine, attempt),
        rank=rank,
    )


def _newest(tx: Reads, found: Job) -> Attempt | None:
    return tx.attempt(found.id, found.epoch) if found.epoch else None


def _output_dir(engine: Engine, attempt: Attempt | None) -> str | None:
    if attempt is None:
        return None
    backend = engine.backend_of(attempt.placement.node)
    if not isinstance(backend, _KeepsOutput):
        return None
    return backend.output_dir(LeaseKey(job=attempt.job, epoch=attempt.epoch))


def jobs(
    engine: Engine, actor: User, lang: str, wanted: JobFilter, cursor: str | None = None
) -> wire.JobPage:
    """List jobs, newest first. A member who names neither lab nor self sees the own lab."""
    if cursor:
        (before,) = render.need_place(cursor, "jobs", 1)
        wanted = msgspec.structs.replace(wanted, before=JobId(before))
    if actor.role is not Role.ADMIN and wanted.user != actor.name:
        if wanted.lab not in (None, actor.lab):
            raise DureError(ErrorCode.FORBIDDEN, action="read_job", id=wanted.lab)
        wanted = msgspec.structs.replace(wanted, lab=actor.lab)
    with engine.store.read() as tx:
        one_more = msgspec.structs.replace(wanted, limit=wanted.limit + 1)
        found = tx.list_jobs(one_more)
        rows = [(j, _newest(tx, j)) for j in found[: wanted.limit]]
    now_ms = engine.clock.now_ms()
    more = len(found) > wanted.limit
    return wire.JobPage(
        items=[render.job_out(j, a, lang, now_ms, engine.policy) for j, a in rows],
        next=render.cursor("jobs", rows[-1][0].id) if more else None,
    )


def attempts(engine: Engine, actor: User, job_id: JobId) -> wire.AttemptList:
    """Show all dispatches of a job."""
    with engine.store.read() as tx:
        seen(tx, actor, job_id)
        found = tx.attempts(job_id)
    return wire.AttemptList(items=[render.attempt_out(a) for a in found])


def events(
    engine: Engine, actor: User, lang: str, job_id: JobId, limit: int, cursor: str | None = None
) -> wire.EventPage:
    """Show what happened to a job, in commit order."""
    after = render.need_place(cursor, "events", 1)[0] if cursor else 0
    with engine.store.read() as tx:
        seen(tx, actor, job_id)
        found = tx.events(after=after, job=job_id, limit=limit + 1)
    page = found[:limit]
    return wire.EventPage(
        items=[render.event_out(e, lang) for e in page],
        next=render.cursor("events", page[-1].id) if len(found) > limit else None,
    )


def slots_of(engine: Engine, tx: Reads, user: User) -> Slots:
    """Slots of a user, in use and allowed."""
    return Slots(
        used=tx.slots_used(user.name), limit=slots_limit(user, tx.lab(user.lab), engine.policy)
    )


# -- queues --------------------------------------------------------------------------


class _Line(msgspec.Struct, frozen=True):
    """The global queue at one moment."""

    cycle: int
    phase: Phase
    labs: list[Lab]
    waiting: Counter[LabId]
    node_wait: int
    promoted: int
    rows: list[tuple[int | None, JobView]]
    next: str | None


def queue(engine: Engine, lang: str, limit: int, cursor: str | None = None) -> wire.QueueOut:
    """Show the line as the scheduler sees it: ranked jobs, then those not ranked now."""
    line = _line(engine, limit, cursor)
    with engine.store.read() as tx:
        known = tx.jobs([v.id for _, v in line.rows])
        waiting = sum(tx.waiting_count(u.name) for u in tx.users())
    now_ms = engine.clock.now_ms()
    return wire.QueueOut(
        as_of_ms=now_ms,
        cycle=line.cycle,
        phase=line.phase,
        labs=[_lab_line(engine, lab, line.waiting[lab.name], now_ms) for lab in line.labs],
        items=[_row(engine, lang, known[v.id], r, now_ms) for r, v in line.rows if v.id in known],
        personal=max(0, waiting - line.promoted),
        node_wait=line.node_wait,
        next=line.next,
    )


def _line(engine: Engine, limit: int, cursor: str | None) -> _Line:
    after = render.place_of(cursor, "ranked", 3) if cursor else None
    before = render.need_place(cursor, "unranked", 1)[0] if cursor and after is None else None
    world = engine.world
    with world.lock:
        index, pool = world.index, world.pool
        rows: list[tuple[int | None, JobView]] = []
        following = None
        if before is None:
            place = tuple(after) if after else ()
            ranked = enumerate(index.ranked(pool), 1)
            found = islice(((n, v) for n, v in ranked if index.rank_key(v) > place), limit + 1)
            rows += found
        if len(rows) > limit:
            rows.pop()
            last = rows[-1][1]
            following = render.cursor("ranked", *index.rank_key(last))
        else:
            room = limit - len(rows)
            unranked = (v for v in index.unranked(pool) if before is None or v.id < before)
            rest = nsmallest(room + 1, unranked, key=lambda v: -v.id)
            rows += [(None, v) for v in rest[:room]]
            if len(rest) > room:
                following = render.cursor("unranked", rest[room].id + 1)
        waiting, node_wait = index.waiting_by_lab(), index.absent_count()
        return _Line(
            cycle=world.cycle,
            phase=world.phase,
            labs=sorted(world.labs.values(), key=lambda x: (index.lab_key(x.name), x.name)),
            waiting=waiting,
            node_wait=node_wait,
            promoted=len(index),
            rows=rows,
            next=following,
        )


def _lab_line(engine: Engine, lab: Lab, waiting: int, now_ms: int) -> wire.LabLine:
    return wire.LabLine(
        lab=lab.name,
        usage_tflop_s=render.usage(lab, now_ms, engine.policy.half_life_ms),
        weight=lab.weight,
        waiting=waiting,
    )


def _row(engine: Engine, lang: str, found: Job, rank: int | None, now_ms: int) -> wire.QueueRow:
    world = engine.world
    # One row at a time: the lock is free between rows for the scheduler.
    with world.lock:
        lab = world.labs.get(found.lab) or Lab(name=found.lab)
        unused = Slots(used=0, limit=1)
        told = explain(found, world.index, world.pool, world.phase, unused, engine.policy)
    return wire.QueueRow(
        rank=rank,
        job=found.id,
        name=found.request.name,
        lab=found.lab,
        user=found.user,
        state=found.state,
        num_gpus=found.request.num_gpus,
        min_vram_gb=found.floor(),
        tiers=list(found.request.tiers),
        waited_s=max(0, now_ms - (found.entered_ms or found.submitted_ms)) // 1000,
        lab_usage_tflop_s=render.usage(lab, now_ms, engine.policy.half_life_ms),
        reservation=render.reservation_out(found.reservation),
        reason=render.reason_out(told.reason, lang),
        eta=render.eta_out(engine.outlook.forecasts.get(found.id), lang, now_ms),
    )


def personal_queue(engine: Engine, actor: User, lang: str) -> wire.PersonalQueueOut:
    """Show the caller's own queue, in the caller's order."""
    with engine.store.read() as tx:
        waiting = tx.personal_queue(actor.name)
        slots = slots_of(engine, tx, actor)
    world = engine.world
    rows = []
    for found in waiting:
        with world.lock:
            told = explain(found, world.index, world.pool, world.phase, slots, engine.policy)
        rows.append(
            wire.PersonalRow(
                job=found.id,
                name=found.request.name,
                num_gpus=found.request.num_gpus,
                held=found.held,
                reason=render.reason_out(told.reason, lang),
            )
        )
    return wire.PersonalQueueOut(slots_used=slots.used, slots_limit=slots.limit, items=rows)


# -- people and account --------------------------------------------------------------


def labs(engine: Engine) -> wire.LabList:
    """Show all labs, least used first."""
    with engine.store.read() as tx:
        rows = tx.labs()
        members = Counter(u.lab for u in tx.users() if u.active)
    with engine.world.lock:
        rows.sort(key=lambda x: (engine.world.index.lab_key(x.name), x.name))
    return wire.LabList(items=[lab_out(engine, row, members[row.name]) for row in rows])


def lab_out(engine: Engine, lab: Lab, members: int) -> wire.LabOut:
    """Render a lab with its use of now."""
    return wire.LabOut(
        name=lab.name,
        title=lab.title,
        weight=lab.weight,
        usage_tflop_s=render.usage(lab, engine.clock.now_ms(), engine.policy.half_life_ms),
        members=members,
        limits=render.limits_out(lab.limits),
    )


def lab(engine: Engine, name: LabId) -> tuple[Lab, wire.LabOut]:
    """Show one lab, with the value an edit is compared with."""
    with engine.store.read() as tx:
        found = tx.lab(name)
        members = sum(u.active and u.lab == name for u in tx.users())
    if found is None:
        raise DureError(ErrorCode.NOT_FOUND, kind="lab", id=name)
    return found, lab_out(engine, found, members)


def usage(
    engine: Engine, actor: User, name: LabId, since_ms: int, limit: int, cursor: str | None = None
) -> wire.UsageOut:
    """Show a lab's account: totals since `since_ms`, and its lines, newest first."""
    if actor.role is not Role.ADMIN and actor.lab != name:
        raise DureError(ErrorCode.FORBIDDEN, action="read_usage", id=name)
    with engine.store.read() as tx:
        found = tx.lab(name)
        lines = tx.ledger(lab=name, since_ms=since_ms)
    if found is None:
        raise DureError(ErrorCode.NOT_FOUND, kind="lab", id=name)
    lines.sort(key=lambda e: (e.booked_ms, e.job, e.epoch, e.kind, e.segment))
    # Counted from the oldest line, so that new ones do not shift the pages.
    end = render.need_place(cursor, "usage", 1)[0] if cursor else len(lines)
    start = max(0, end - limit)
    now_ms = engine.clock.now_ms()
    return wire.UsageOut(
        lab=name,
        as_of_ms=now_ms,
        usage_tflop_s=render.usage(found, now_ms, engine.policy.half_life_ms),
        charged_tflop_s=render.charged(lines, CHARGED),
        run_tflop_s=render.charged(lines, [LedgerKind.RUN]),
        reserved_tflop_s=render.charged(lines, [LedgerKind.RESERVED]),
        opening_tflop_s=render.charged(lines, [LedgerKind.OPENING]),
        lines=[render.ledger_line(e) for e in reversed(lines[start : max(start, end)])],
        next=render.cursor("usage", start) if start > 0 else None,
    )


def users(engine: Engine, actor: User) -> wire.UserList:
    """Show everybody to an administrator, the own lab to a member."""
    with engine.store.read() as tx:
        wanted = [u for u in tx.users() if actor.role is Role.ADMIN or u.lab == actor.lab]
        return wire.UserList(items=[_user_out(engine, tx, u) for u in wanted])


def user(engine: Engine, actor: User, name: UserId) -> tuple[User, wire.UserOut]:
    """Show one person, with the value an edit is compared with."""
    with engine.store.read() as tx:
        found = tx.user(name)
        allowed = actor.role is Role.ADMIN or (found is not None and found.lab == actor.lab)
        if not allowed:
            # The same answer for unknown people: names of other labs are not told.
            raise DureError(ErrorCode.FORBIDDEN, action="read_user", id=name)
        if found is None:
            raise DureError(ErrorCode.NOT_FOUND, kind="user", id=name)
        return found, _user_out(engine, tx, found)


def _user_out(engine: Engine, tx: Reads, found: User) -> wire.UserOut:
    slots = slots_of(engine, tx, found)
    return wire.UserOut(
        name=found.name,
        lab=found.lab,
        role=found.role,
        active=found.active,
        limits=render.limits_out(found.limits),
        unix_uid=found.unix_uid or None,
        slots_used=slots.used,
        slots_limit=slots.limit,
    )


def tokens(engine: Engine, actor: User) -> wire.TokenList:
    """Show the caller's tokens, without their secrets."""
    with engine.store.read() as tx:
        return wire.TokenList(items=[render.token_out(t) for t in tx.tokens(actor.name)])


def usage_stamp(engine: Engine) -> list[tuple[str, int]]:
    """What stands behind all decayed numbers: changes when something is charged, not with time."""
    with engine.world.lock:
        return [(n, engine.world.index.lab_key(n)) for n in sorted(engine.world.labs)]
