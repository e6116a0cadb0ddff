"""The two queues: whose turn it is in a personal queue, and the index of the global one.

`QueueIndex` is a fold over job views. It prunes: of each shape only the first
floor(idle GPUs of its placements / num_gpus) jobs in rank order can be dispatched in a
cycle, so a cycle costs O(labs x shapes + candidates), not O(waiting).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from dure.core.laborder import LabOrder
from dure.core.model import (
    PROMOTED_WAIT,
    Job,
    JobId,
    JobState,
    JobView,
    Lab,
    LabId,
    Lease,
    Phase,
    PlacementId,
    Shape,
)
from dure.core.placement import Pool, fits, usable
from dure.core.plan import Snapshot
from dure.core.policy import Charging, Policy

_Entry = tuple[int, JobId]
"""(queue_entered_ms, job id): the order inside a lab."""


def next_promotable(waiting: Iterable[Job], now_ms: int) -> Job | None:
    """First job of a personal queue that may be promoted, in the user's order (policy 2)."""
    return next((j for j in waiting if promotable(j, now_ms)), None)


def promotable(job: Job, now_ms: int) -> bool:
    """Neither held, nor too early, nor without any placement that fits."""
    return not job.held and job.request.not_before_ms <= now_ms and not job.fit_lost


class _Shelf:
    """Waiting jobs of one shape: ready ones per lab in order, delayed and absent ones."""

    __slots__ = ("absent", "delayed", "ready", "size")

    def __init__(self) -> None:
        self.ready: dict[LabId, list[_Entry]] = {}
        self.delayed: set[JobId] = set()
        self.absent: set[JobId] = set()
        self.size = 0

    def members(self) -> Iterator[JobId]:
        """All jobs of the shape."""
        for entries in self.ready.values():
            yield from (job for _, job in entries)
        yield from self.delayed

    def lists(self, shape: Shape, line: LabOrder) -> Iterator[list[list[_Entry]]]:
        """Ready jobs per lab, labs in order; those with equal use together."""
        for labs in line.groups():
            found = [
                self.ready[lab]
                for lab in labs
                if lab in self.ready and line.within_limit(lab, shape)
            ]
            if found:
                yield found

    def first(self, shape: Shape, line: LabOrder, count: int, *, labs_move: bool) -> list[JobId]:
        """The first `count` ready jobs in rank order.

        Where a lab moves back within a cycle, any lab's may be first: `count` of each.
        """
        jobs: list[JobId] = []
        for lists in self.lists(shape, line):
            for _, job in heapq.merge(*(entries[:count] for entries in lists)):
                if len(jobs) == count and not labs_move:
                    return jobs
                jobs.append(job)
        return jobs

    def oldest(self, shape: Shape, line: LabOrder, count: int, until_ms: int) -> list[_Entry]:
        """The first `count` ready jobs by time of entry, none entered after `until_ms`."""
        heads = (
            entry
            for lists in self.lists(shape, line)
            for entries in lists
            for entry in entries[:count]
            if entry[0] <= until_ms
        )
        return heapq.nsmallest(count, heads)


class QueueIndex:
    """Promoted waiting jobs, kept in rank order per (lab, shape)."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._views: dict[JobId, JobView] = {}
        self._shelf_of: dict[JobId, Shape] = {}
        self._shelves: dict[Shape, _Shelf] = {}
        self._line = LabOrder(policy)
        self._due: list[tuple[int, JobId]] = []
        self._holders: dict[JobId, JobView] = {}
        self._fit_cache: dict[Shape, tuple[list[PlacementId], bool]] = {}
        self._fit_version = -1
        self._tier_floors: tuple[float, ...] = ()
        self.now_ms = 0

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, job: JobId) -> bool:
        return job in self._views

    # -- folding -----------------------------------------------------------------

    def put_lab(self, lab: Lab) -> None:
        """Take a lab's usage, weight and limits."""
        self._line.put(lab)

    def started(self, lease: Lease, lab: LabId, mtflops: int, at_ms: int) -> None:
        """Count what a running attempt costs from now on, for P-11's order."""
        self._line.started((lease.job, lease.epoch), lab, len(lease.gpus) * mtflops, at_ms)

    def ended(self, job: JobId, epoch: int) -> None:
        """An attempt holds its GPUs no more."""
        self._line.ended((job, epoch))

    def put(self, view: JobView) -> None:
        """Take a job's new view; a job that no longer waits leaves the index."""
        self._remove(view.id)
        if view.state not in PROMOTED_WAIT:
            return
        view = without_old_skips(view, self.now_ms)
        if view.lab not in self._line:
            self.put_lab(Lab(name=view.lab))
        self._views[view.id] = view
        if view.reservation is not None:
            self._holders[view.id] = view
        self._shelve(view)

    def remove(self, job: JobId) -> None:
        """Forget a job."""
        self._remove(job)

    def advance(self, now_ms: int) -> None:
        """Let time pass: delays that are over make jobs ready, skips run out."""
        self.now_ms = max(self.now_ms, now_ms)
        self._line.advance(self.now_ms)
        while self._due and self._due[0][0] <= self.now_ms:
            _, job = heapq.heappop(self._due)
            view = self._views.get(job)
            if view is not None:
                self.put(view)

    def next_due_ms(self) -> int | None:
        """When `advance` will next change something."""
        return self._due[0][0] if self._due else None

    def _shelve(self, view: JobView) -> None:
        shape = rounded(view.shape, self._tier_floors)
        shelf = self._shelves.get(shape)
        if shelf is None:
            shelf = self._shelves[shape] = _Shelf()
        self._shelf_of[view.id] = shape
        shelf.size += 1
        if view.state is JobState.NODE_WAIT:
            shelf.absent.add(view.id)
        if view.eligible_ms > self.now_ms:
            shelf.delayed.add(view.id)
            heapq.heappush(self._due, (view.eligible_ms, view.id))
            return
        entries = shelf.ready.setdefault(view.lab, [])
        entry = (view.entered_ms, view.id)
        if not entries or entries[-1] < entry:
            entries.append(entry)
        else:
            insort(entries, entry)
        for skip in shape.skips:
            heapq.heappush(self._due, (skip.until_ms, view.id))

    def _remove(self, job: JobId) -> None:
        view = self._views.pop(job, None)
        if view is None:
            return
        self._holders.pop(job, None)
        shape = self._shelf_of.pop(job)
        shelf = self._shelves[shape]
        shelf.size -= 1
        shelf.absent.discard(job)
        if job in shelf.delayed:
            shelf.delayed.discard(job)
        else:
            entries = shelf.ready[view.lab]
            entries.pop(bisect_left(entries, (view.entered_ms, job)))
            if not entries:
                del shelf.ready[view.lab]
        if shelf.size == 0:
            del self._shelves[shape]
            self._fit_cache.pop(shape, None)

    # -- pool --------------------------------------------------------------------

    def _follow(self, pool: Pool) -> None:
        """Forget what was known of fits when the pool's tiers or nodes changed."""
        if self._fit_version == pool.version:
            return
        self._fit_version = pool.version
        self._fit_cache.clear()
        floors = tuple(sorted({t.vram_gb for t in pool.tiers.values()}))
        if floors != self._tier_floors:
            self._tier_floors = floors
            for view in list(self._views.values()):
                if view.shape.floor_gb > 0:
                    self.put(view)

    def _fit(self, shape: Shape, pool: Pool) -> tuple[list[PlacementId], bool]:
        """(usable placements, whether some fitting one is in service)."""
        found = self._fit_cache.get(shape)
        if found is None:
            views = [v for v in pool.views(self.now_ms) if fits(shape, v)]
            found = (
                [v.id for v in views if usable(shape, v)],
                any(v.in_service for v in views),
            )
            self._fit_cache[shape] = found
        return found

    def presence_changes(self, pool: Pool) -> tuple[list[JobId], list[JobId]]:
        """Jobs that must go to NODE_WAIT, and jobs that must come back from it."""
        self._follow(pool)
        away: list[JobId] = []
        back: list[JobId] = []
        for shape, shelf in self._shelves.items():
            in_service = self._fit(shape, pool)[1]
            if in_service:
                back += shelf.absent
            elif len(shelf.absent) < shelf.size:
                away += [j for j in shelf.members() if j not in shelf.absent]
        return sorted(away), sorted(back)

    # -- reading -----------------------------------------------------------------

    def snapshot(self, pool: Pool, cycle: int, phase: Phase = Phase.NORMAL) -> Snapshot:
        """The pruned snapshot of this moment: `plan` on it equals `plan` on all jobs."""
        self._follow(pool)
        views = pool.views(self.now_ms)
        idle = {v.id: count for v in views if (count := v.idle)}
        found: dict[JobId, JobView] = {}
        elders = self._elders(pool, idle)
        moves = self._policy.charging is Charging.LOOKAHEAD
        if idle:
            for shape, shelf in self._shelves.items():
                places = self._fit(shape, pool)[0]
                room = sum(idle.get(p, 0) for p in places) // shape.num_gpus
                if room:
                    for job in shelf.first(shape, self._line, room, labs_move=moves):
                        found[job] = self._views[job]
        found |= {job: self._views[job] for job in elders}
        head = next(self.ranked(pool), None)
        if head is not None:
            found[head.id] = head
        return Snapshot(
            cycle=cycle,
            now_ms=self.now_ms,
            phase=phase,
            placements=views,
            candidates=tuple(sorted(found.values(), key=self.rank_key)),
            head=head.id if head else None,
            holders=tuple(self._holders.values()),
            lab_keys=self._line.keys(),
            elders=elders,
        )

    def _elders(self, pool: Pool, idle: dict[PlacementId, int]) -> tuple[JobId, ...]:
        """Ranked jobs past the age bound that this cycle could help, oldest first.

        Of each shape as many as could start, and as many again as may reserve.
        """
        policy = self._policy
        if not policy.age_bound_s:
            return ()
        until_ms = self.now_ms - round(policy.age_bound_s * 1000)
        found: list[_Entry] = []
        for shape, shelf in self._shelves.items():
            if shape.num_gpus < policy.age_min_gpus:
                continue
            places = self._fit(shape, pool)[0]
            if places:
                room = sum(idle.get(p, 0) for p in places) // shape.num_gpus
                count = room + policy.aged_reservations
                found += shelf.oldest(shape, self._line, count, until_ms)
        kept = (
            (v.entered_ms, v.id) for v in self._holders.values() if self._aged(v, until_ms, pool)
        )
        return tuple(job for _, job in sorted({*found, *kept}))

    def _aged(self, view: JobView, until_ms: int, pool: Pool) -> bool:
        return (
            view.entered_ms <= until_ms
            and view.shape.num_gpus >= self._policy.age_min_gpus
            and self.is_ranked(view.id, pool)
        )

    def rank_key(self, view: JobView) -> tuple[int, int, JobId]:
        """P-8: lab's use, then time of entry, then job id."""
        return (self._line.key(view.lab), view.entered_ms, view.id)

    def ranked(self, pool: Pool) -> Iterator[JobView]:
        """All ranked jobs, first to last, lazily."""
        self._follow(pool)
        shelves = [
            (shape, s)
            for shape, s in self._shelves.items()
            if s.ready and self._fit(shape, pool)[0]
        ]
        for labs in self._line.groups():
            lists = [
                s.ready[lab]
                for lab in labs
                for shape, s in shelves
                if lab in s.ready and self._line.within_limit(lab, shape)
            ]
            merged = lists[0] if len(lists) == 1 else heapq.merge(*lists)
            for _, job in merged:
                yield self._views[job]

    def rank(self, job: JobId, pool: Pool) -> int | None:
        """Position of a ranked job, from 1; None if it is not ranked now."""
        view = self._views.get(job)
        if view is None or not self.is_ranked(job, pool):
            return None
        mine = self.rank_key(view)
        ahead = 0
        for shape, shelf in self._shelves.items():
            if not self._fit(shape, pool)[0]:
                continue
            for lab, entries in shelf.ready.items():
                if not self._line.within_limit(lab, shape):
                    continue
                key = self._line.key(lab)
                if key < mine[0]:
                    ahead += len(entries)
                elif key == mine[0]:
                    ahead += bisect_left(entries, mine[1:])
        return ahead + 1

    def is_ranked(self, job: JobId, pool: Pool) -> bool:
        """Eligible, within its lab's limit, with a fitting placement in service (P-8)."""
        self._follow(pool)
        shape = self._shelf_of.get(job)
        if shape is None or job in self._shelves[shape].delayed:
            return False
        return bool(self._fit(shape, pool)[0]) and self._line.within_limit(
            self._views[job].lab, shape
        )

    def unranked(self, pool: Pool) -> Iterator[JobView]:
        """Promoted jobs in no rank now: node wait, backoff, refused everywhere, lab limit."""
        self._follow(pool)
        for shape, shelf in self._shelves.items():
            yield from (self._views[job] for job in shelf.delayed)
            usable_now = bool(self._fit(shape, pool)[0])
            for lab, entries in shelf.ready.items():
                if not usable_now or not self._line.within_limit(lab, shape):
                    yield from (self._views[job] for _, job in entries)

    def waiting_by_lab(self) -> Counter[LabId]:
        """How many promoted jobs of each lab wait."""
        count: Counter[LabId] = Counter()
        for shelf in self._shelves.values():
            count.update({lab: len(entries) for lab, entries in shelf.ready.items()})
            count.update(self._views[job].lab for job in shelf.delayed)
        return count

    def absent_count(self) -> int:
        """How many jobs wait for a node."""
        return sum(len(shelf.absent) for shelf in self._shelves.values())

    def view(self, job: JobId) -> JobView | None:
        """The view of a promoted waiting job."""
        return self._views.get(job)

    def holders(self) -> tuple[JobView, ...]:
        """Jobs that hold a reservation."""
        return tuple(self._holders.values())

    def lab_key(self, lab: LabId) -> int:
        """The lab's order key; labs not seen yet have used nothing."""
        return self._line.key(lab)


def rounded(shape: Shape, tier_floors_gb: tuple[float, ...]) -> Shape:
    """The shape with its VRAM floor rounded up to a tier's, so that few shapes exist."""
    floor_gb = next((f for f in tier_floors_gb if f >= shape.floor_gb), shape.floor_gb)
    if shape.floor_gb > 0 and floor_gb != shape.floor_gb:
        return msgspec.structs.replace(shape, floor_gb=floor_gb)
    return shape


def without_old_skips(view: JobView, now_ms: int) -> JobView:
    """The view without skips that ran out: the planner would still obey them."""
    skips = tuple(s for s in view.shape.skips if s.until_ms > now_ms)
    if skips == view.shape.skips:
        return view
    shape = msgspec.structs.replace(view.shape, skips=skips)
    return msgspec.structs.replace(view, shape=shape)
