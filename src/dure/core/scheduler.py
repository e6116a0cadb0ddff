"""One dispatch cycle (policy 4): `plan(snapshot, policy) -> Plan`, a pure function.

Rule: what is decided here depends on the snapshot alone; the applier may refuse parts.
"""

from __future__ import annotations

from dure.core.blocks import Blocks
from dure.core.floor import Floor
from dure.core.line import Line
from dure.core.model import JobId, JobView, Phase
from dure.core.placement import fits
from dure.core.plan import (
    Absorb,
    Decision,
    Dispatch,
    Plan,
    Reason,
    ReasonCode,
    Release,
    ReleaseCause,
    Reserve,
    Snapshot,
)
from dure.core.policy import Policy


def plan(snapshot: Snapshot, policy: Policy, *, reasons: bool = True) -> Plan:
    """Decide one cycle; `snapshot.candidates` stand in rank order.

    Without `reasons` the plan does not say why others wait: a fifth of a cycle's cost, for
    replays that nobody asks.
    """
    cycle = _Cycle(snapshot, policy, reasons=reasons)
    if snapshot.phase is Phase.NORMAL:
        cycle.elders_first()
        cycle.line_in_order()
    return Plan(
        cycle=snapshot.cycle,
        decisions=tuple(cycle.decisions),
        reasons=cycle.reasons,
        order=cycle.line.order(),
    )


class _Cycle:
    """One cycle while it is decided: the floor shrinks, decisions grow."""

    def __init__(self, snapshot: Snapshot, policy: Policy, *, reasons: bool) -> None:
        self._tells = reasons
        self.snapshot = snapshot
        self.policy = policy
        self.floor = Floor(snapshot, policy.placement_order)
        self.line = Line(snapshot, policy)
        self.decisions: list[Decision] = []
        self.reasons: dict[JobId, Reason] = {}
        self.reserved = _release_first(snapshot, policy, self.floor, self.decisions)

    def elders_first(self) -> None:
        """Jobs past the age bound, oldest first: start whole, else grow or reserve."""
        if not self.snapshot.elders:
            return
        jobs = {j.id: j for j in self.snapshot.candidates}
        places = self.policy.aged_reservations - len(self.reserved - {self.snapshot.head})
        for job in (jobs[i] for i in self.snapshot.elders):
            if self.floor.idle == 0:
                return
            step = _dispatch(job, self.floor, job.id in self.reserved)
            if not step and job.id in self.reserved:
                step = _absorb(job, self.floor)
            elif not step and places > 0:
                step = _reserve(job, self.floor)
                places -= len(step)
            # What is not helped now still has its turn, as every job.
            if step:
                self._note(job, step)

    def line_in_order(self) -> None:
        """Everybody in rank order, until nothing is idle."""
        blocks = Blocks(self.snapshot, self.policy, self.line)
        for job in self.line:
            if self.floor.idle == 0:
                return
            while (larger := blocks.before(job, self.floor)) is not None:
                self._note(larger, self._decide(larger))
            self._note(job, self._decide(job))

    def _decide(self, job: JobView) -> list[Decision]:
        holds = job.id in self.reserved
        return _decide(job, self.snapshot, self.floor, self.policy, holds)

    def _note(self, job: JobView, step: list[Decision]) -> None:
        self.line.look_at(job)
        self.decisions += step
        started = next((d for d in step if isinstance(d, Dispatch)), None)
        if started is None:
            if not self._tells:
                return
            self.reasons[job.id] = _reason(job, self.snapshot, self.floor)
        else:
            self.line.started(job, self.floor.views[started.placement].tier.mtflops)


def _keeps(snapshot: Snapshot, policy: Policy) -> set[JobId]:
    """Who may hold: rank 1, and the oldest by age, as many as the policy says."""
    holders = {h.id for h in snapshot.holders}
    aged = [i for i in snapshot.elders if i in holders and i != snapshot.head]
    first = () if snapshot.head is None else (snapshot.head,)
    return {*first, *aged[: policy.aged_reservations]}


def _release_first(
    snapshot: Snapshot, policy: Policy, floor: Floor, decisions: list[Decision]
) -> set[JobId]:
    """R3 and R5 before any dispatch: what they free is idle in this cycle."""
    kept: set[JobId] = set()
    keeps = _keeps(snapshot, policy)
    for holder in snapshot.holders:
        cause = _broken(holder, snapshot, floor, keeps)
        if cause is None:
            kept.add(holder.id)
        else:
            decisions.append(_release(holder, cause, floor))
    return kept


def _broken(
    holder: JobView, snapshot: Snapshot, floor: Floor, keeps: set[JobId]
) -> ReleaseCause | None:
    held = holder.reservation
    assert held is not None
    view = floor.views.get(held.placement)
    if (
        snapshot.phase is not Phase.NORMAL
        or view is None
        or not view.in_service
        or not fits(holder.shape, view)
        # A GPU went sick or was taken: fewer are left than are reserved.
        or view.healthy_free < held.count
        # One that it would need is sick: it would hold the others for nobody.
        or view.healthy < holder.shape.num_gpus
    ):
        return ReleaseCause.BROKEN
    return None if holder.id in keeps else ReleaseCause.LOST_RANK


def _release(job: JobView, cause: ReleaseCause, floor: Floor) -> Release:
    held = job.reservation
    assert held is not None
    floor.drop(held.placement, job.id)
    return Release(job=job.id, placement=held.placement, gpus=held.count, cause=cause)


def _decide(
    job: JobView, snapshot: Snapshot, floor: Floor, policy: Policy, holds: bool
) -> list[Decision]:
    started = _dispatch(job, floor, holds)
    if started:
        return started
    if holds:
        return _absorb(job, floor)
    if job.id == snapshot.head and job.shape.num_gpus >= policy.reserve_min_gpus:
        return _reserve(job, floor)
    return []


def _dispatch(job: JobView, floor: Floor, holds: bool) -> list[Decision]:
    """(a): the best fitting placement that is available now."""
    own = job.reservation.placement if holds and job.reservation else None
    view = floor.best(job, own)
    if view is None:
        return []
    decisions: list[Decision] = []
    if own is not None:
        cause = ReleaseCause.USED if own == view.id else ReleaseCause.SWAPPED
        decisions.append(_release(job, cause, floor))
    gpus, evict = floor.pick(view, job.shape.num_gpus)
    floor.take(view.id, gpus)
    decisions.append(Dispatch(job=job.id, placement=view.id, gpus=gpus, evict=evict))
    return decisions


def _absorb(job: JobView, floor: Floor) -> list[Decision]:
    """(b): grow inside the same placement; a frozen one has no idle GPUs to give."""
    held = job.reservation
    assert held is not None
    count = min(job.shape.num_gpus, floor.available(held.placement, job.id))
    if count <= held.count:
        return []
    floor.hold(held.placement, job.id, count)
    return [Absorb(job=job.id, placement=held.placement, count=count)]


def _reserve(job: JobView, floor: Floor) -> list[Decision]:
    """(c): take what is idle on the best placement that could hold the job whole."""
    options = [
        (*floor.tier_key(v), -idle, v.id)
        for v in floor.with_idle(job.shape)
        if v.healthy >= job.shape.num_gpus and (idle := floor.available(v.id, job.id)) >= 1
    ]
    if not options:
        return []
    best = min(options)
    idle, placement = -best[-2], best[-1]
    floor.hold(placement, job.id, idle)
    return [Reserve(job=job.id, placement=placement, count=idle)]


def _reason(job: JobView, snapshot: Snapshot, floor: Floor) -> Reason:
    """Why a job that was looked at does not start in this cycle."""
    need = job.shape.num_gpus
    held = next(((p, h[job.id]) for p, h in floor.held.items() if job.id in h), None)
    if held is not None:
        where = {"node": held[0].node, "tier": held[0].tier}
        return Reason(code=ReasonCode.RESERVING, params={"held": held[1], "needed": need, **where})
    idle = [floor.available(v.id, job.id) for v in floor.with_idle(job.shape)]
    if sum(idle) >= need:
        return Reason(
            code=ReasonCode.NEEDS_ONE_NODE,
            params={"needed": need, "idle": sum(idle), "most": max(idle)},
        )
    if job.id == snapshot.head:
        params = {"needed": need, "gpus": floor.capacity(job.shape)}
        return Reason(code=ReasonCode.NO_FREE_GPU, params={**params})
    return Reason(code=ReasonCode.RANK_BEHIND, params={"needed": need})
