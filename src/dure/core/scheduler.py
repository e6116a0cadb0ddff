"""One dispatch cycle (policy 4): `plan(snapshot, policy) -> Plan`, a pure function.

Rule: what is decided here depends on the snapshot alone; the applier may refuse parts.
"""

from __future__ import annotations

from collections.abc import Iterable

from dure.core.model import JobId, JobView, Phase, PlacementId, Shape
from dure.core.placement import PlacementView, fits, usable
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


class _Floor:
    """The pool while one cycle hands it out."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.views = {v.id: v for v in snapshot.placements}
        self.free = {v.id: list(v.free) for v in snapshot.placements if v.takes_work}
        self.idle = sum(len(f) for f in self.free.values())
        self.held: dict[PlacementId, dict[JobId, int]] = {}
        self._usable: dict[Shape, list[PlacementView]] = {}
        for holder in snapshot.holders:
            if holder.reservation is not None:
                by_job = self.held.setdefault(holder.reservation.placement, {})
                by_job[holder.id] = holder.reservation.count

    def usable(self, shape: Shape) -> list[PlacementView]:
        """Placements in service that fit and have not just refused; one search a shape."""
        found = self._usable.get(shape)
        if found is None:
            found = [v for v in self.views.values() if usable(shape, v)]
            self._usable[shape] = found
        return found

    def available(self, placement: PlacementId, job: JobId) -> int:
        """Idle GPUs there for `job`: what others have reserved is not."""
        held = self.held.get(placement)
        others = sum(n for j, n in held.items() if j != job) if held else 0
        return len(self.free.get(placement, ())) - others

    def pick(self, view: PlacementView, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Truly empty GPUs before those with a replica, then lowest index."""
        replicas = set(view.replicas)
        order = sorted(self.free[view.id], key=lambda i: (i in replicas, i))[:count]
        return tuple(sorted(order)), tuple(sorted(i for i in order if i in replicas))

    def take(self, placement: PlacementId, gpus: Iterable[int]) -> None:
        taken = set(gpus)
        self.free[placement] = [i for i in self.free[placement] if i not in taken]
        self.idle -= len(taken)

    def hold(self, placement: PlacementId, job: JobId, count: int) -> None:
        self.held.setdefault(placement, {})[job] = count

    def drop(self, placement: PlacementId, job: JobId) -> None:
        self.held.get(placement, {}).pop(job, None)


def plan(snapshot: Snapshot, policy: Policy) -> Plan:
    """Decide one cycle; `snapshot.candidates` stand in rank order."""
    floor = _Floor(snapshot)
    decisions: list[Decision] = []
    reasons: dict[JobId, Reason] = {}
    reserved = _release_first(snapshot, floor, decisions)
    if snapshot.phase is not Phase.NORMAL:
        return Plan(cycle=snapshot.cycle, decisions=tuple(decisions), reasons=reasons)
    for job in snapshot.candidates:
        if floor.idle == 0:
            break
        step = _decide(job, snapshot, floor, policy, job.id in reserved)
        decisions += step
        if not any(isinstance(d, Dispatch) for d in step):
            reasons[job.id] = _reason(job, snapshot, floor)
    return Plan(cycle=snapshot.cycle, decisions=tuple(decisions), reasons=reasons)


def _release_first(snapshot: Snapshot, floor: _Floor, decisions: list[Decision]) -> set[JobId]:
    """R3 and R5 before any dispatch: what they free is idle in this cycle."""
    kept: set[JobId] = set()
    for holder in snapshot.holders:
        cause = _broken(holder, snapshot, floor)
        if cause is None:
            kept.add(holder.id)
        else:
            decisions.append(_release(holder, cause, floor))
    return kept


def _broken(holder: JobView, snapshot: Snapshot, floor: _Floor) -> ReleaseCause | None:
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
    ):
        return ReleaseCause.BROKEN
    return None if holder.id == snapshot.head else ReleaseCause.LOST_RANK


def _release(job: JobView, cause: ReleaseCause, floor: _Floor) -> Release:
    held = job.reservation
    assert held is not None
    floor.drop(held.placement, job.id)
    return Release(job=job.id, placement=held.placement, gpus=held.count, cause=cause)


def _decide(
    job: JobView, snapshot: Snapshot, floor: _Floor, policy: Policy, holds: bool
) -> list[Decision]:
    started = _dispatch(job, floor, holds)
    if started:
        return started
    if holds:
        return _absorb(job, floor)
    if job.id == snapshot.head and job.shape.num_gpus >= policy.reserve_min_gpus:
        return _reserve(job, floor)
    return []


def _dispatch(job: JobView, floor: _Floor, holds: bool) -> list[Decision]:
    """(a): the best fitting placement that is available now."""
    need = job.shape.num_gpus
    own = job.reservation.placement if holds and job.reservation else None
    best: tuple[tuple[object, ...], PlacementView, tuple[int, ...], tuple[int, ...]] | None = None
    for view in floor.usable(job.shape):
        left = floor.available(view.id, job.id) - need
        if left < 0:
            continue
        gpus, evict = floor.pick(view, need)
        key = (-view.tier.sort_order, view.id != own, left, len(evict), view.id)
        if best is None or key < best[0]:
            best = (key, view, gpus, evict)
    if best is None:
        return []
    _, view, gpus, evict = best
    decisions: list[Decision] = []
    if own is not None:
        cause = ReleaseCause.USED if own == view.id else ReleaseCause.SWAPPED
        decisions.append(_release(job, cause, floor))
    floor.take(view.id, gpus)
    decisions.append(Dispatch(job=job.id, placement=view.id, gpus=gpus, evict=evict))
    return decisions


def _absorb(job: JobView, floor: _Floor) -> list[Decision]:
    """(b): grow inside the same placement; a frozen one has no idle GPUs to give."""
    held = job.reservation
    assert held is not None
    count = min(job.shape.num_gpus, floor.available(held.placement, job.id))
    if count <= held.count:
        return []
    floor.hold(held.placement, job.id, count)
    return [Absorb(job=job.id, placement=held.placement, count=count)]


def _reserve(job: JobView, floor: _Floor) -> list[Decision]:
    """(c): rank 1 takes what is idle on the best placement that could hold it whole."""
    options = [
        (-v.tier.sort_order, -idle, v.id)
        for v in floor.usable(job.shape)
        if (idle := floor.available(v.id, job.id)) >= 1
    ]
    if not options:
        return []
    _, idle, placement = min(options)
    floor.hold(placement, job.id, -idle)
    return [Reserve(job=job.id, placement=placement, count=-idle)]


def _reason(job: JobView, snapshot: Snapshot, floor: _Floor) -> Reason:
    """Why a job that was looked at does not start in this cycle."""
    need = job.shape.num_gpus
    views = floor.usable(job.shape)
    held = next(((p, h[job.id]) for p, h in floor.held.items() if job.id in h), None)
    if held is not None:
        where = {"node": held[0].node, "tier": held[0].tier}
        return Reason(code=ReasonCode.RESERVING, params={"held": held[1], "needed": need, **where})
    idle = [floor.available(v.id, job.id) for v in views]
    if sum(idle) >= need:
        return Reason(
            code=ReasonCode.NEEDS_ONE_NODE,
            params={"needed": need, "idle": sum(idle), "most": max(idle)},
        )
    if job.id == snapshot.head:
        total = sum(v.capacity for v in views)
        return Reason(code=ReasonCode.NO_FREE_GPU, params={"needed": need, "gpus": total})
    return Reason(code=ReasonCode.RANK_BEHIND, params={"needed": need})
