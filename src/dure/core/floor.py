"""The pool while one cycle hands it out: what is free, what is held, which place is best."""

from __future__ import annotations

from collections.abc import Iterable

from dure.core.model import JobId, JobView, PlacementId, Shape
from dure.core.placement import PlacementView, usable
from dure.core.plan import Snapshot
from dure.core.policy import PlacementOrder


class Floor:
    """Free GPUs and reservations of one snapshot, changed by the plan as it grows."""

    def __init__(self, snapshot: Snapshot, order: PlacementOrder) -> None:
        self.views = {v.id: v for v in snapshot.placements}
        self.free = {v.id: list(v.free) for v in snapshot.placements if v.takes_work and v.free}
        self.idle = sum(len(f) for f in self.free.values())
        self.held: dict[PlacementId, dict[JobId, int]] = {}
        self._smallest = order is PlacementOrder.SMALLEST_FITTING_TIER
        self._with_idle: dict[Shape, list[PlacementView]] = {}
        for holder in snapshot.holders:
            if holder.reservation is not None:
                by_job = self.held.setdefault(holder.reservation.placement, {})
                by_job[holder.id] = holder.reservation.count

    def with_idle(self, shape: Shape) -> list[PlacementView]:
        """Usable placements that had something idle when the cycle began."""
        found = self._with_idle.get(shape)
        if found is None:
            # Most of a busy pool is full: fit is asked only where something is idle.
            found = [v for p in self.free if usable(shape, v := self.views[p])]
            self._with_idle[shape] = found
        return found

    def capacity(self, shape: Shape) -> int:
        """GPUs of all usable placements, busy ones too."""
        return sum(v.capacity for v in self.views.values() if usable(shape, v))

    def available(self, placement: PlacementId, job: JobId) -> int:
        """Idle GPUs there for `job`: what others have reserved is not."""
        free = len(self.free.get(placement, ()))
        held = self.held.get(placement)
        return free - sum(n for j, n in held.items() if j != job) if held else free

    def tier_key(self, view: PlacementView) -> tuple[int, int]:
        """Which tier first: the best, or the one whose placements are smallest."""
        if self._smallest:
            return view.capacity, -view.tier.sort_order
        return -view.tier.sort_order, 0

    def best(self, job: JobView, own: PlacementId | None) -> PlacementView | None:
        """Where the job starts whole now: tier, its own, fullest after, fewest evictions."""
        need = job.shape.num_gpus
        best: tuple[tuple[object, ...], PlacementView] | None = None
        for view in self.with_idle(job.shape):
            left = len(self.free[view.id]) - need
            if left < 0 or (left := self.available(view.id, job.id) - need) < 0:
                continue
            evictions = len(self.pick(view, need)[1]) if view.replicas else 0
            key = (self.tier_key(view), view.id != own, left, evictions, view.id)
            if best is None or key < best[0]:
                best = (key, view)
        return best[1] if best else None

    def pick(self, view: PlacementView, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Truly empty GPUs before those with a replica, then lowest index."""
        replicas = set(view.replicas)
        order = sorted(self.free[view.id], key=lambda i: (i in replicas, i))[:count]
        return tuple(sorted(order)), tuple(sorted(i for i in order if i in replicas))

    def take(self, placement: PlacementId, gpus: Iterable[int]) -> None:
        """GPUs are given to a job."""
        taken = set(gpus)
        self.free[placement] = [i for i in self.free[placement] if i not in taken]
        self.idle -= len(taken)

    def hold(self, placement: PlacementId, job: JobId, count: int) -> None:
        """A job holds `count` GPUs there."""
        self.held.setdefault(placement, {})[job] = count

    def drop(self, placement: PlacementId, job: JobId) -> None:
        """A job holds nothing there any more."""
        self.held.get(placement, {}).pop(job, None)
