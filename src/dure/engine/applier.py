"""Turns a plan into intents, and intents into launches.

Write ahead: the raised epoch, the attempt and its lease stand in the store before any
backend is asked. Each decision is checked again against the newest truth and may be
refused; a launch that was not confirmed is asked again (idempotent by job and epoch).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from dure.core.account import LOST
from dure.core.events import EventName
from dure.core.lifecycle import JobEvent, step
from dure.core.maintenance import dispatches
from dure.core.model import Attempt, Job, Node, NodeId, PlacementId, UserId
from dure.core.placement import PlacementView, share
from dure.core.plan import (
    Absorb,
    Decision,
    Dispatch,
    Plan,
    Release,
    ReleaseCause,
    Reserve,
    Snapshot,
)
from dure.core.reservation import finish, grow, settle, take
from dure.engine.engine import Engine
from dure.engine.faultpoints import reached
from dure.engine.work import Work
from dure.engine.world import view_of
from dure.ports import LaunchOrder, LaunchResult, LaunchStatus, LeaseKey, Reads


class Applied(msgspec.Struct, frozen=True):
    """How many decisions were kept, and which launches a backend refused."""

    kept: int
    refused: list[LaunchResult]


def apply(engine: Engine, snapshot: Snapshot, plan: Plan) -> Applied:
    """Write a plan's decisions, then launch what it dispatches."""
    if not plan.decisions:
        return Applied(0, [])
    with engine.change("dispatch") as work:
        kept = _write(work, snapshot, plan)
        orders = launch_orders(work, kept)
    refused = launch(engine, orders)
    reached("dispatch.after_launch")
    return Applied(len(kept), refused)


def _write(work: Work, snapshot: Snapshot, plan: Plan) -> list[Decision]:
    work.load(d.job for d in plan.decisions)
    planned = {v.id: v for v in (*snapshot.candidates, *snapshot.holders)}
    changed = {
        job_id
        for job_id, view in planned.items()
        if (job := work.job(job_id)) is None or view_of(job, snapshot.now_ms) != view
    }
    # Maintenance may have begun between plan and apply (I7); releases go on (R5).
    moves = dispatches(work.tx.phase())
    kept: list[Decision] = []
    for decision in plan.decisions:
        may = isinstance(decision, Release) or (moves and _still_idle(work, decision))
        if decision.job in changed or not may:
            # What follows was planned on this one: it may need what a release frees, or
            # take what an earlier job could now have. The next cycle decides anew.
            break
        _write_one(work, decision)
        kept.append(decision)
    return kept


def _still_idle(work: Work, decision: Dispatch | Reserve | Absorb) -> bool:
    """The placement still takes work and still has the GPUs; else the next cycle decides."""
    view = work.placement(decision.placement)
    if view is None or not view.takes_work:
        return False
    return not isinstance(decision, Dispatch) or set(decision.gpus) <= set(view.free)


def _write_one(work: Work, decision: Decision) -> None:
    job = work.job(decision.job)
    assert job is not None
    match decision:
        case Release():
            _release(work, job, decision)
        case Reserve():
            rate = _view(work, decision.placement).tier.mtflops
            held = take(job, decision.placement, decision.count, rate, work.now_ms)
            _tell_reserved(work, held, decision.count)
        case Absorb():
            rate = _view(work, decision.placement).tier.mtflops
            held = grow(job, decision.count, rate, work.now_ms)
            _tell_reserved(work, held, decision.count)
        case Dispatch():
            _dispatch(work, job, decision)


def _tell_reserved(work: Work, job: Job, count: int) -> None:
    assert job.reservation is not None
    place = job.reservation.placement
    work.put(
        job,
        EventName.JOB_RESERVED,
        held=count,
        needed=job.request.num_gpus,
        node=place.node,
        tier=place.tier,
    )


def _release(work: Work, job: Job, decision: Release) -> None:
    """R3 and R5 are charged at once, swap and own dispatch with the attempt (R4)."""
    if decision.cause in (ReleaseCause.SWAPPED, ReleaseCause.USED):
        after = finish(job, work.now_ms)
    else:
        settled = settle(job, work.now_ms, _last_good_ms(work, decision))
        work.book(settled.entries)
        after = msgspec.structs.replace(settled.job, lost_reservation=True)
    where = {"node": decision.placement.node, "tier": decision.placement.tier}
    cause = decision.cause.value
    work.put(after, EventName.JOB_RESERVATION_ENDED, cause=cause, held=decision.gpus, **where)


def _last_good_ms(work: Work, decision: Release) -> int | None:
    """R5 on a lost node charges only up to its last good report."""
    node = work.world.pool.nodes.get(decision.placement.node)
    if decision.cause is not ReleaseCause.BROKEN or node is None:
        return None
    gone = node.health.value == "OFFLINE" and node.last_seen_ms
    return min(node.last_seen_ms, work.now_ms) if gone else None


def _view(work: Work, placement: PlacementId) -> PlacementView:
    view = work.placement(placement)
    assert view is not None, "checked by _still_idle"
    return view


def _dispatch(work: Work, job: Job, decision: Dispatch) -> None:
    view = _view(work, decision.placement)
    epoch = job.epoch + 1
    attempt = Attempt(
        job=job.id,
        epoch=epoch,
        lab=job.lab,
        placement=decision.placement,
        gpus=decision.gpus,
        mtflops=view.tier.mtflops,
        vram_gb=view.tier.vram_gb,
        simulated=view.simulated,
        dispatched_ms=work.now_ms,
        start_no=job.starts + 1,
        segments=job.segments,
    )
    after = msgspec.structs.replace(
        job,
        state=step(job.state, JobEvent.DISPATCHED),
        epoch=epoch,
        segments=(),
        eligible_ms=0,
        waiting_for="",
        lost_reservation=False,
    )
    where = {"node": decision.placement.node, "tier": decision.placement.tier}
    work.add_attempt(after, attempt, num_gpus=len(decision.gpus), **where)


# -- launching -----------------------------------------------------------------------


def launch_orders(work: Work, decisions: Iterable[Decision]) -> list[LaunchOrder]:
    """Orders for what a plan has dispatched."""
    orders: list[LaunchOrder] = []
    uids: dict[UserId, int] = {}
    for decision in decisions:
        if isinstance(decision, Dispatch):
            job = work.job(decision.job)
            assert job is not None
            attempt = work.attempt(job.id, job.epoch)
            assert attempt is not None
            if job.user not in uids:
                uids[job.user] = unix_uid_of(work.tx, job.user)
            orders.append(
                launch_order(
                    job,
                    attempt,
                    work.world.pool.nodes,
                    work.world.policy.stop_kill_s,
                    uids[job.user],
                )
            )
    return orders


def unix_uid_of(tx: Reads, user: UserId) -> int:
    """Whom a user's jobs run as; 0: nobody was named."""
    found = tx.user(user)
    return found.unix_uid if found is not None else 0


def launch_order(
    job: Job,
    attempt: Attempt,
    nodes: dict[NodeId, Node],
    kill_after_s: float,
    unix_uid: int,
) -> LaunchOrder:
    """Everything the backend needs; the same attempt always gives the same order."""
    request = job.request
    signal = request.pre_stop_signal
    node = nodes.get(attempt.placement.node)
    granted = share(node, len(attempt.gpus)) if node is not None else None
    return LaunchOrder(
        key=LeaseKey(job=job.id, epoch=attempt.epoch),
        placement=attempt.placement,
        gpus=attempt.gpus,
        user=job.user,
        lab=job.lab,
        name=request.name,
        command=request.command,
        env=request.env,
        workdir=request.workdir,
        start_no=attempt.start_no,
        time_limit_s=request.time_limit_s,
        pre_stop_signal=signal.signal if signal else "",
        pre_stop_before_s=signal.before_s if signal else 0,
        kill_after_s=kill_after_s,
        cores=granted.cores if granted else 1,
        memory_mib=granted.memory_mib if granted else 0,
        vram_mib=round(attempt.vram_gb * 1024) * len(attempt.gpus),
        simulated=attempt.simulated,
        idempotent=request.idempotent,
        copy_from_epoch=attempt.epoch - 1,
        unix_uid=unix_uid,
    )


def launch(engine: Engine, orders: Sequence[LaunchOrder]) -> list[LaunchResult]:
    """Ask the backends; return what they refused, which goes back in line (policy 5)."""
    _fence_earlier(engine, orders)
    by_backend: dict[str, list[LaunchOrder]] = defaultdict(list)
    refused: list[LaunchResult] = []
    for order in orders:
        backend = engine.backend_of(order.placement.node)
        if backend is None:
            gone = f"node {order.placement.node} has no backend here"
            refused.append(_refusal(order.key, gone))
        else:
            by_backend[backend.name].append(order)
    for name, batch in by_backend.items():
        results = engine.backends[name].launch(batch)
        refused += [r for r in results if r.status is LaunchStatus.REFUSED]
    return refused


def _fence_earlier(engine: Engine, orders: Sequence[LaunchOrder]) -> None:
    """A lost lease must not come back beside its successor (policy 6)."""
    again = [o.key for o in orders if o.key.epoch > 1]
    if not again:
        return
    with engine.store.read() as tx:
        earlier = [a for key in again for a in tx.attempts(key.job) if a.epoch < key.epoch]
    for attempt in earlier:
        backend = engine.backend_of(attempt.placement.node)
        if attempt.freed_ms is None and attempt.outcome in LOST and backend is not None:
            backend.fence([LeaseKey(job=attempt.job, epoch=attempt.epoch)])


def _refusal(key: LeaseKey, reason: str) -> LaunchResult:
    return LaunchResult(key=key, status=LaunchStatus.REFUSED, reason=reason)
