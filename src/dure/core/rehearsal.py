"""The planner in virtual time on a copy of line and pool: what would happen from here on.

Nobody submits, nothing fails, every job runs as long as it is told to. Used to say when a job
may start and what would start it sooner, so the answer follows the rules that will decide.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from dure.core.fairshare import book
from dure.core.model import JobId, JobView, Lab, LabId, Lease, PlacementId, Reservation, Value
from dure.core.placement import Pool
from dure.core.plan import Absorb, Dispatch, Release, ReleaseCause, Reserve
from dure.core.policy import Policy
from dure.core.queues import QueueIndex
from dure.core.scheduler import plan


class Running(Value, frozen=True, kw_only=True):
    """A lease that holds its GPUs until `ends_ms`."""

    lease: Lease
    lab: LabId
    mtflops: int
    started_ms: int
    ends_ms: int


class Start(Value, frozen=True, kw_only=True):
    """When and where a job starts; `after` is the job whose GPUs it waited for."""

    at_ms: int
    placement: PlacementId
    after: JobId | None = None


class Rehearsal:
    """One run from now on; give it what runs and waits, then `run`."""

    def __init__(self, policy: Policy, pool: Pool, labs: Iterable[Lab], now_ms: int) -> None:
        self._policy = policy
        self._pool = pool.copy()
        self._index = QueueIndex(policy)
        self._index.advance(now_ms)
        self._labs: dict[LabId, Lab] = {}
        self._run_ms: dict[JobId, int] = {}
        self._ends: list[tuple[int, JobId, int, Running]] = []
        self._last_freed: dict[PlacementId, JobId] = {}
        self._reserved_micro: dict[JobId, int] = defaultdict(int)
        self._now_ms = now_ms
        self.starts: dict[JobId, Start] = {}
        for lab in labs:
            self._put_lab(lab)

    def running(self, found: Running) -> None:
        """Take a lease that the pool holds already."""
        key = (found.ends_ms, found.lease.job, found.lease.epoch, found)
        heapq.heappush(self._ends, key)
        self._index.started(found.lease, found.lab, found.mtflops, found.started_ms)

    def waiting(self, view: JobView, run_ms: int) -> None:
        """Take a promoted waiting job that will run for `run_ms`."""
        self._index.put(view)
        self._run_ms[view.id] = max(1, run_ms)

    def run(self, until: Iterable[JobId], max_cycles: int) -> Mapping[JobId, Start]:
        """Go on until all of `until` have started, nothing more can, or the cycles are used up."""
        wanted = set(until)
        while max_cycles > 0:
            moved = self._cycle()
            max_cycles -= 1
            if wanted <= self.starts.keys():
                break
            if not moved and not self._advance():
                break
        return self.starts

    # -- time --

    def _advance(self) -> bool:
        """Go to the next end or delay that is over; False if there is none."""
        rests = (n.penalty_until_ms for n in self._pool.nodes.values())
        due = [at for at in (self._index.next_due_ms(), self._next_end_ms()) if at is not None]
        due += [at for at in rests if at > self._now_ms]
        if not due or not len(self._index):
            return False
        self._now_ms = max(self._now_ms, min(due))
        while self._ends and self._ends[0][0] <= self._now_ms:
            self._end(heapq.heappop(self._ends)[3])
        self._index.advance(self._now_ms)
        return True

    def _next_end_ms(self) -> int | None:
        return self._ends[0][0] if self._ends else None

    def _end(self, ended: Running) -> None:
        lease = ended.lease
        self._pool.release(lease.job, lease.epoch)
        self._index.ended(lease.job, lease.epoch)
        self._last_freed[lease.placement] = lease.job
        cost = len(lease.gpus) * (self._now_ms - ended.started_ms) * ended.mtflops
        self._charge(ended.lab, cost + self._reserved_micro.pop(lease.job, 0))

    def _charge(self, lab: LabId, cost_micro: int) -> None:
        known = self._labs.get(lab) or Lab(name=lab)
        self._put_lab(book(known, cost_micro, self._now_ms, self._policy.half_life_ms))

    def _put_lab(self, lab: Lab) -> None:
        self._labs[lab.name] = lab
        self._index.put_lab(lab)

    # -- one cycle --

    def _cycle(self) -> int:
        made = plan(self._index.snapshot(self._pool, cycle=0), self._policy, reasons=False)
        for decision in made.decisions:
            view = self._index.view(decision.job)
            assert view is not None
            match decision:
                case Dispatch():
                    self._start(view, decision)
                case Release():
                    self._release(view, decision)
                case Reserve() | Absorb():
                    self._hold(view, decision)
        return len(made.decisions)

    def _start(self, view: JobView, decision: Dispatch) -> None:
        mtflops = self._pool.tiers[decision.placement.tier].mtflops
        lease = Lease(
            job=view.id, epoch=view.epoch + 1, placement=decision.placement, gpus=decision.gpus
        )
        self._pool.take(lease)
        self._index.remove(view.id)
        self.starts[view.id] = Start(
            at_ms=self._now_ms,
            placement=decision.placement,
            after=self._last_freed.get(decision.placement),
        )
        self.running(
            Running(
                lease=lease,
                lab=view.lab,
                mtflops=mtflops,
                started_ms=self._now_ms,
                ends_ms=self._now_ms + self._run_ms[view.id],
            )
        )

    def _hold(self, view: JobView, decision: Reserve | Absorb) -> None:
        self._close_segment(view)
        held = Reservation(
            placement=decision.placement,
            count=decision.count,
            since_ms=self._now_ms,
            mtflops=self._pool.tiers[decision.placement.tier].mtflops,
        )
        self._index.put(msgspec.structs.replace(view, reservation=held))

    def _close_segment(self, view: JobView) -> None:
        held = view.reservation
        if held is not None:
            length_ms = max(0, self._now_ms - held.since_ms)
            self._reserved_micro[view.id] += held.count * length_ms * held.mtflops

    def _release(self, view: JobView, decision: Release) -> None:
        self._close_segment(view)
        self._index.put(msgspec.structs.replace(view, reservation=None))
        if decision.cause in (ReleaseCause.LOST_RANK, ReleaseCause.BROKEN):
            self._charge(view.lab, self._reserved_micro.pop(view.id, 0))
