"""Why a job waits, on demand, by the planner's own code (policy 11)."""

from __future__ import annotations

from dure.core.model import (
    PROMOTED_WAIT,
    Job,
    JobState,
    LabId,
    NodeHealth,
    Phase,
    Shape,
    Value,
)
from dure.core.placement import PlacementView, Pool, failed_constraint, shape_of
from dure.core.plan import Dispatch, Plan, Reason, ReasonCode
from dure.core.policy import Policy
from dure.core.queues import QueueIndex
from dure.core.scheduler import plan

C = ReasonCode


class PlacementNote(Value, frozen=True, kw_only=True):
    """One placement as it concerns one job."""

    node: str
    tier: str
    idle: int
    capacity: int
    in_service: bool
    fits: bool
    lacks: str = ""
    free_at_ms: int | None = None
    """When enough of it is expected to be free for the job; None: now, never or unknown."""


class Explanation(Value, frozen=True, kw_only=True):
    """Primary reason first, then what else is true of a waiting job."""

    reason: Reason
    more: tuple[Reason, ...] = ()
    rank: int | None = None
    ahead_labs: tuple[LabId, ...] = ()
    placements: tuple[PlacementNote, ...] = ()


class Slots(Value, frozen=True, kw_only=True):
    """A user's slots: in use, and allowed."""

    used: int
    limit: int


def explain(
    job: Job, index: QueueIndex, pool: Pool, phase: Phase, slots: Slots, policy: Policy
) -> Explanation:
    """Explain one waiting job; reasons depend only on what the next cycle would see."""
    shape = shape_of(job, index.now_ms)
    views = pool.views(index.now_ms)
    found = _reasons(job, shape, index, pool, phase, slots, policy)
    ahead = _ahead(job, index, pool)
    return Explanation(
        reason=found[0],
        more=tuple(found[1:]),
        rank=index.rank(job.id, pool),
        ahead_labs=ahead,
        placements=tuple(_note(shape, v) for v in views),
    )


def _note(shape: Shape, view: PlacementView) -> PlacementNote:
    lacks = failed_constraint(shape, view)
    return PlacementNote(
        node=view.id.node,
        tier=view.id.tier,
        idle=view.idle,
        capacity=view.capacity,
        in_service=view.in_service,
        fits=lacks is None,
        lacks=lacks or "",
    )


def _reasons(
    job: Job,
    shape: Shape,
    index: QueueIndex,
    pool: Pool,
    phase: Phase,
    slots: Slots,
    policy: Policy,
) -> list[Reason]:
    found = _blocked(job, shape, index, pool, phase)
    if job.state is JobState.PERSONAL_QUEUE_WAIT and not found:
        if slots.used >= slots.limit:
            found.append(
                Reason(code=C.PERSONAL_LIMIT, params={"used": slots.used, "limit": slots.limit})
            )
        else:
            found.append(Reason(code=C.NEXT_CYCLE))
    if job.state in PROMOTED_WAIT and not found:
        found.append(_queued(job, index, pool, policy))
    if job.floor_gb > 0 and job.state in PROMOTED_WAIT:
        found.append(Reason(code=C.OOM_ESCALATED, params={"min_vram_gb": job.floor_gb}))
    if job.lost_reservation and job.state in PROMOTED_WAIT:
        found.append(Reason(code=C.RESERVATION_LOST))
    return found


def _blocked(job: Job, shape: Shape, index: QueueIndex, pool: Pool, phase: Phase) -> list[Reason]:
    """Everything that keeps a job out of the ranking."""
    now = index.now_ms
    found: list[Reason] = []
    if phase is not Phase.NORMAL:
        found.append(Reason(code=C.MAINTENANCE, params={"phase": phase.value}))
    if job.held:
        found.append(Reason(code=C.HELD))
    fitting = [v for v in pool.views(now) if failed_constraint(shape, v) is None]
    if not fitting:
        found.append(Reason(code=C.FIT_LOST, params={"num_gpus": shape.num_gpus}))
    elif not any(v.in_service for v in fitting):
        found += _absent(job, fitting, now)
    if job.request.not_before_ms > now:
        params: dict[str, str | int | float] = {"until_ms": job.request.not_before_ms}
        found.append(Reason(code=C.NOT_BEFORE, params=params))
    if job.eligible_ms > now:
        params = {"until_ms": job.eligible_ms, "retry": job.retries}
        found.append(Reason(code=C.RETRY_BACKOFF, params=params))
    in_service = [v for v in fitting if v.in_service]
    if in_service and len(shape.skips) and not index_usable(shape, in_service):
        until = min(s.until_ms for s in shape.skips)
        found.append(
            Reason(code=C.LAUNCH_RETRY, params={"until_ms": until, "refusals": job.refusals})
        )
    if job.state in PROMOTED_WAIT and not found and not index.is_ranked(job.id, pool):
        found.append(Reason(code=C.LAB_LIMIT, params={"num_gpus": shape.num_gpus}))
    return found


def index_usable(shape: Shape, views: list[PlacementView]) -> bool:
    """Whether some of `views` has not just refused this job."""
    skipped = {s.placement for s in shape.skips}
    return any(v.id not in skipped for v in views)


def _absent(job: Job, fitting: list[PlacementView], now_ms: int) -> list[Reason]:
    """Nothing that fits is in service: for which node the job waits, and why."""
    found = []
    for view in fitting[:3]:
        code = C.NODE_DRAINED if view.drained else C.NODE_OFFLINE
        found.append(Reason(code=code, params={"node": view.id.node, "tier": view.id.tier}))
    if job.state is JobState.NODE_WAIT:
        waited = max(0, now_ms - job.node_wait_since_ms) // 1000
        found.append(Reason(code=C.NODE_WAIT, params={"waited_s": waited}))
    return found


def _queued(job: Job, index: QueueIndex, pool: Pool, policy: Policy) -> Reason:
    """A ranked job: ask the planner what the next cycle would do with it."""
    snapshot = index.snapshot(pool, cycle=0)
    made = plan(snapshot, policy)
    if any(isinstance(d, Dispatch) and d.job == job.id for d in made.decisions):
        return Reason(code=C.NEXT_CYCLE)
    return _refined(job, made, index, pool)


def _refined(job: Job, made: Plan, index: QueueIndex, pool: Pool) -> Reason:
    planned = made.reasons.get(job.id)
    if planned is not None and planned.code is not C.RANK_BEHIND:
        return planned
    if job.reservation is not None:
        held = job.reservation
        params: dict[str, str | int | float] = {
            "held": held.count,
            "needed": job.request.num_gpus,
            "node": held.placement.node,
            "tier": held.placement.tier,
        }
        return Reason(code=C.RESERVING, params=params)
    shape = shape_of(job, index.now_ms)
    fitting = [
        v for v in pool.views(index.now_ms) if v.in_service and failed_constraint(shape, v) is None
    ]
    unavailable = _unavailable(fitting, index.now_ms, pool)
    if unavailable is not None:
        return unavailable
    ahead = (index.rank(job.id, pool) or 1) - 1
    total = sum(v.capacity for v in fitting)
    if ahead == 0:
        return Reason(code=C.NO_FREE_GPU, params={"needed": job.request.num_gpus, "gpus": total})
    code = C.SAME_LAB_BEHIND if set(_ahead(job, index, pool)) == {job.lab} else C.RANK_BEHIND
    return Reason(code=code, params={"ahead": ahead, "gpus": total})


def _unavailable(fitting: list[PlacementView], now_ms: int, pool: Pool) -> Reason | None:
    """In service, but no fitting placement takes work: name the first one's cause."""
    if not fitting or any(v.takes_work and v.healthy_free for v in fitting):
        return None
    for view in fitting:
        node = pool.nodes[view.id.node]
        params: dict[str, str | int | float] = {"node": node.name}
        if view.health is NodeHealth.SUSPECTED:
            return Reason(code=C.NODE_SUSPECTED, params=params)
        if node.penalty_until_ms > now_ms:
            return Reason(code=C.NODE_PENALTY, params={**params, "until_ms": node.penalty_until_ms})
        sick = any(g.tier == view.id.tier and (not g.healthy or g.foreign) for g in node.gpus)
        if not node.ready or (sick and len(fitting) == 1):
            return Reason(code=C.GPU_UNAVAILABLE, params=params)
    return None


def _ahead(job: Job, index: QueueIndex, pool: Pool) -> tuple[LabId, ...]:
    """Labs that have a ranked job before this one (the first hundred are looked at)."""
    labs: list[LabId] = []
    for seen, view in enumerate(index.ranked(pool)):
        if view.id == job.id or seen >= 100:
            break
        if view.lab not in labs:
            labs.append(view.lab)
    return tuple(labs)
