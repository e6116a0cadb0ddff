"""Replay a trace through the production planner, in virtual time.

Event driven on a grid of a few seconds: ends and submits are exact, decisions fall on the
grid, as the sweep's would. Jobs run as long as the trace says; nothing fails unless asked.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping

import msgspec

from dure.core.fairshare import book
from dure.core.model import (
    JobId,
    JobState,
    JobView,
    Lab,
    LabId,
    Lease,
    Reservation,
    UserId,
)
from dure.core.placement import Pool
from dure.core.plan import Absorb, Dispatch, Plan, Release, ReleaseCause, Reserve
from dure.core.policy import Policy
from dure.core.queues import QueueIndex
from dure.core.scheduler import plan
from dure.sim.contenders import Line
from dure.sim.fifo import plan_strict
from dure.sim.trace import Cluster, Trace, TraceJob, shape_of


class Ran(msgspec.Struct, frozen=True, gc=False):
    """One job's fate: when it was submitted, started and ended, in seconds."""

    job: TraceJob
    start_s: float
    end_s: float
    tier: str


class Result(msgspec.Struct):
    """What a replay produced."""

    ran: list[Ran]
    reserved_gpu_s: float = 0.0
    reservations: int = 0
    broken: int = 0
    cycles: int = 0
    decisions: int = 0
    gpus: int = 0
    violations: tuple[str, ...] = ()
    """Broken invariants; the planner alone keeps no account that could be checked."""


class Options(msgspec.Struct, frozen=True):
    """How a replay runs. `slots` 0 lifts the personal limit; `slots_of` goes before it."""

    grid_s: float = 5.0
    slots: int = 0
    slots_of: Mapping[str, int] = {}
    line: Line = Line.PLANNER
    until_quiet: bool = False
    """Cycles follow each other until one decides nothing, as the engine's do."""


ONE_LAB = LabId("everybody")
"""The only lab of a line that knows no labs."""
Tell = Callable[[int, int], None]
"""Called with (jobs done, jobs in all) now and then."""


class Replay:
    """One trace on one cluster under one policy."""

    def __init__(
        self, trace: Trace, cluster: Cluster, policy: Policy, options: Options | None = None
    ) -> None:
        self.options = options or Options()
        self.policy = policy
        self.trace = trace
        self.pool = Pool()
        for tier in cluster.tiers:
            self.pool.put_tier(tier)
        for node in cluster.nodes:
            self.pool.put_node(node)
        self.index = QueueIndex(policy)
        self.labs: dict[LabId, Lab] = {}
        self.jobs: dict[JobId, TraceJob] = {}
        self.result = Result(ran=[], gpus=cluster.gpus)
        self._reserved: dict[JobId, list[tuple[int, int, int]]] = defaultdict(list)
        self._ends: list[tuple[int, JobId, Lease, int, int]] = []
        self._slots: dict[UserId, int] = defaultdict(int)
        self._personal: dict[UserId, deque[JobView]] = defaultdict(deque)
        known = {lab.name: lab for lab in trace.labs}
        for name in sorted({LabId(j.lab) for j in trace.jobs}):
            self._put_lab(known.get(name) or Lab(name=name))

    def run(self, tell: Tell | None = None) -> Result:
        """Replay everything."""
        grid_ms = round(self.options.grid_s * 1000)
        pending = deque(self.trace.jobs)
        while pending or self._ends or len(self.index):
            due = []
            if pending:
                due.append(round(pending[0].submit_s * 1000))
            if self._ends:
                due.append(self._ends[0][0])
            if not due:
                break
            now_ms = -(-min(due) // grid_ms) * grid_ms
            self._finish(now_ms)
            while pending and round(pending[0].submit_s * 1000) <= now_ms:
                self._submit(pending.popleft())
            self.index.advance(now_ms)
            # One cycle a grid point, as a sweep sees it: what it changes is seen at the next.
            while self._cycle(now_ms) and self.options.until_quiet:
                pass
            while self._lend(now_ms):
                self._cycle(now_ms)
            if tell is not None and self.result.cycles % 512 == 0:
                tell(len(self.result.ran), len(self.trace.jobs))
        if tell is not None:
            tell(len(self.result.ran), len(self.trace.jobs))
        return self.result

    # -- what happens --

    def _submit(self, job: TraceJob) -> None:
        number = JobId(job.id)
        self.jobs[number] = job
        view = JobView(
            id=number,
            lab=LabId(job.lab) if self.options.line is Line.PLANNER else ONE_LAB,
            user=UserId(job.user),
            state=JobState.GLOBAL_QUEUE_WAIT,
            shape=shape_of(job),
            entered_ms=round(job.submit_s * 1000),
        )
        if self._used_up(view.user):
            self._personal[view.user].append(view)
            return
        self._slots[view.user] += 1
        self.index.put(view)

    def _used_up(self, user: UserId) -> bool:
        limit = self.options.slots_of.get(user, self.options.slots)
        return bool(limit) and self._slots[user] >= limit

    def _promote(self, user: UserId, now_ms: int) -> None:
        self._slots[user] -= 1
        if self._personal[user] and not self._used_up(user):
            view = self._personal[user].popleft()
            self._slots[user] += 1
            self.index.put(msgspec.structs.replace(view, entered_ms=now_ms))

    def _lend(self, now_ms: int) -> bool:
        """`slots_borrow`: promote one job beyond the limit that would start at once."""
        waiting = [queue[0] for queue in self._personal.values() if queue]
        if not (waiting and self.policy.slots_borrow and any(v.idle for v in self.pool.views())):
            return False
        waiting.sort(key=lambda v: (self.index.lab_key(v.lab), self._slots[v.user], v.id))
        for view in waiting:
            self.index.put(msgspec.structs.replace(view, entered_ms=now_ms))
            made = self._plan()
            if any(isinstance(d, Dispatch) and d.job == view.id for d in made.decisions):
                self._personal[view.user].popleft()
                self._slots[view.user] += 1
                return True
            self.index.remove(view.id)
        return False

    def _finish(self, now_ms: int) -> None:
        while self._ends and self._ends[0][0] <= now_ms:
            end_ms, number, lease, start_ms, mtflops = heapq.heappop(self._ends)
            job = self.jobs[number]
            cost = job.num_gpus * (end_ms - start_ms) * mtflops
            cost += sum(n * ms * rate for n, ms, rate in self._reserved.pop(number, ()))
            self.pool.release(number, 1)
            self.index.ended(number, 1)
            self._charge(LabId(job.lab), cost, end_ms)
            ran = Ran(job, start_ms / 1000, end_ms / 1000, lease.placement.tier)
            self.result.ran.append(ran)
            self._promote(UserId(job.user), now_ms)

    def _charge(self, lab: LabId, cost_micro: int, at_ms: int) -> None:
        self._put_lab(book(self.labs[lab], cost_micro, at_ms, self.policy.half_life_ms))

    def _put_lab(self, lab: Lab) -> None:
        self.labs[lab.name] = lab
        if self.options.line is Line.PLANNER:
            self.index.put_lab(lab)

    # -- one cycle --

    def _cycle(self, now_ms: int) -> int:
        self.result.cycles += 1
        made = self._plan()
        self.result.decisions += len(made.decisions)
        for decision in made.decisions:
            view = self.index.view(decision.job)
            assert view is not None
            match decision:
                case Dispatch():
                    self._start(view, decision, now_ms)
                case Release():
                    self._release(view, decision, now_ms)
                case Reserve() | Absorb():
                    self._hold(view, decision, now_ms)
        return len(made.decisions)

    def _plan(self) -> Plan:
        cycle = self.result.cycles
        if self.options.line is Line.STRICT:
            return plan_strict(self.index, self.pool, cycle, self.policy)
        return plan(self.index.snapshot(self.pool, cycle), self.policy, reasons=False)

    def _start(self, view: JobView, decision: Dispatch, now_ms: int) -> None:
        lease = Lease(job=view.id, epoch=1, placement=decision.placement, gpus=decision.gpus)
        self.pool.take(lease)
        self.index.remove(view.id)
        mtflops = self.pool.tiers[decision.placement.tier].mtflops
        self.index.started(lease, view.lab, mtflops, now_ms)
        end_ms = now_ms + round(self.jobs[view.id].run_s * 1000)
        heapq.heappush(self._ends, (end_ms, view.id, lease, now_ms, mtflops))

    def _hold(self, view: JobView, decision: Reserve | Absorb, now_ms: int) -> None:
        self._close_segment(view, now_ms)
        if isinstance(decision, Reserve):
            self.result.reservations += 1
        held = Reservation(
            placement=decision.placement,
            count=decision.count,
            since_ms=now_ms,
            mtflops=self.pool.tiers[decision.placement.tier].mtflops,
        )
        self.index.put(msgspec.structs.replace(view, reservation=held))

    def _close_segment(self, view: JobView, now_ms: int) -> None:
        held = view.reservation
        if held is not None:
            piece = (held.count, now_ms - held.since_ms, held.mtflops)
            self._reserved[view.id].append(piece)
            self.result.reserved_gpu_s += piece[0] * piece[1] / 1000

    def _release(self, view: JobView, decision: Release, now_ms: int) -> None:
        self._close_segment(view, now_ms)
        self.index.put(msgspec.structs.replace(view, reservation=None))
        if decision.cause in (ReleaseCause.LOST_RANK, ReleaseCause.BROKEN):
            self.result.broken += 1
            cost = sum(n * ms * rate for n, ms, rate in self._reserved.pop(view.id, ()))
            self._charge(LabId(self.jobs[view.id].lab), cost, now_ms)
