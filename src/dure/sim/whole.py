"""Replay a trace through the whole engine: store, controller, machines, account.

Everything a server runs, in virtual time, on the in-memory store and simulated machines.
Slower than the planner alone, for traces up to some thousand jobs; it proves that the
account closes. Time stands on the same grid as in `dure.sim.replay`.
"""

from __future__ import annotations

from collections import deque

import msgspec

from dure.adapters.clock import ManualClock
from dure.adapters.compute.simulated import SimRun, SimulatedBackend
from dure.adapters.store.memory import MemoryStore
from dure.core.events import Event, EventName
from dure.core.fairshare import decayed_micro
from dure.core.invariants import World, check_world
from dure.core.model import (
    MICRO_PER_TFLOP_S,
    JobId,
    JobRequest,
    JobState,
    Lab,
    LabId,
    Limits,
    NodeId,
    TierId,
    User,
    UserId,
)
from dure.core.plan import ReleaseCause
from dure.core.policy import Policy
from dure.engine import admin, commands
from dure.engine.controller import Controller
from dure.engine.engine import Engine
from dure.ports import LaunchOrder, Reads
from dure.sim.replay import Options, Ran, Result, Tell
from dure.sim.trace import Cluster, Trace, TraceJob

ZERO_MS = 1_800_000_000_000
"""Time zero of the trace; a whole number of grid steps of any usual size."""
_NO_LIMIT = 1 << 40
_ACTOR = "simulation"
_BROKEN = {ReleaseCause.LOST_RANK.value, ReleaseCause.BROKEN.value}


class Whole:
    """One trace on one cluster through one engine."""

    def __init__(
        self, trace: Trace, cluster: Cluster, policy: Policy, options: Options | None = None
    ) -> None:
        self.options = options or Options()
        self.trace = trace
        self.cluster = cluster
        self.policy = msgspec.structs.replace(
            policy,
            slots_per_user=self.options.slots or _NO_LIMIT,
            waiting_per_user=_NO_LIMIT,
            default_time_limit_s=0,
            max_time_limit_s=0,
        )
        self.clock = ManualClock(ZERO_MS)
        self.backend = SimulatedBackend(self.clock, cluster.nodes, self._script)
        self.store = MemoryStore()
        with self.store.write() as tx:
            for tier in cluster.tiers:
                tx.put_tier(tier)
            for node in cluster.nodes:
                tx.put_node(msgspec.structs.replace(node, backend=self.backend.name))
        self.engine = Engine(self.store, self.clock, self.policy, {self.backend.name: self.backend})
        self.controller = Controller(self.engine, sweep_s=self.options.grid_s)
        self.jobs: dict[JobId, TraceJob] = {}
        self._people: dict[tuple[str, str], User] = {}
        for name in sorted({LabId(j.lab) for j in trace.jobs}):
            self._put_lab(name)

    def run(self, tell: Tell | None = None) -> Result:
        """Replay everything, then check the account."""
        grid_ms = round(self.options.grid_s * 1000)
        pending = deque(self.trace.jobs)
        turns = 0
        while (due_ms := self._next_due_ms(pending)) is not None:
            now_ms = -(-due_ms // grid_ms) * grid_ms
            self.clock.set_ms(max(now_ms, self.clock.now_ms()))
            while pending and _at_ms(pending[0]) <= now_ms:
                self._submit(pending.popleft())
            self.controller.sweep()
            turns += 1
            if tell is not None and turns % 64 == 0:
                tell(len(self.jobs) - len(self.engine.world.index), len(self.trace.jobs))
        if tell is not None:
            tell(len(self.jobs), len(self.trace.jobs))
        with self.store.read() as tx:
            return self._result(tx, turns)

    def _next_due_ms(self, pending: deque[TraceJob]) -> int | None:
        due = [self.backend.next_due_ms(), self.engine.world.index.next_due_ms()]
        due += [_at_ms(pending[0])] if pending else []
        return min((d for d in due if d is not None), default=None)

    # -- what goes in --

    def _put_lab(self, name: LabId) -> None:
        known = next((x for x in self.trace.labs if x.name == name), Lab(name=name))
        used = decayed_micro(known, 0, self.policy.half_life_ms) / MICRO_PER_TFLOP_S
        admin.put_lab(self.engine, _ACTOR, name, weight=known.weight, opening_tflop_s=used)

    def _person(self, job: TraceJob) -> User:
        """The job's user; one who works for two labs is two people to the engine."""
        found = self._people.get((job.user, job.lab))
        if found is None:
            slots = self.options.slots_of.get(job.user)
            limits = Limits() if slots is None else Limits(slots=slots or _NO_LIMIT)
            second = any(user == job.user for user, _ in self._people)
            name = UserId(f"{job.user} ({job.lab})" if second else job.user)
            found = User(name=name, lab=LabId(job.lab), limits=limits)
            admin.put_user(self.engine, _ACTOR, found)
            self._people[job.user, job.lab] = found
        return found

    def _submit(self, job: TraceJob) -> None:
        request = JobRequest(
            name=job.name,
            lab=LabId(job.lab),
            command=("replayed",),
            num_gpus=job.num_gpus,
            tiers=tuple(TierId(t) for t in job.tiers),
            node=NodeId(job.node) if job.node else None,
            min_vram_gb=job.min_vram_gb,
        )
        made = commands.submit(self.engine, self._person(job), [request]).jobs[0]
        self.jobs[made.id] = job

    def _script(self, order: LaunchOrder) -> SimRun:
        return SimRun(run_ms=round(self.jobs[order.key.job].run_s * 1000))

    # -- what comes out --

    def _result(self, tx: Reads, turns: int) -> Result:
        ran = [
            Ran(
                self.jobs[a.job],
                (a.started_ms - ZERO_MS) / 1000,
                ((a.freed_ms or 0) - ZERO_MS) / 1000,
                a.placement.tier,
            )
            for a in tx.all_attempts()
            if a.started_ms is not None
        ]
        ran.sort(key=lambda r: (r.end_s, r.job.id))
        result = Result(ran=ran, gpus=self.cluster.gpus, cycles=turns)
        result.violations = self._violations(tx)
        for event in self._events(tx):
            if event.name is EventName.JOB_RESERVATION_ENDED:
                result.reservations += 1
                result.broken += event.params.get("cause") in _BROKEN
        return result

    def _events(self, tx: Reads) -> list[Event]:
        return tx.events(limit=tx.last_event_id())

    def _violations(self, tx: Reads) -> tuple[str, ...]:
        jobs = tuple(tx.all_jobs())
        world = World(
            jobs=jobs,
            attempts=tuple(tx.all_attempts()),
            ledger=tuple(tx.ledger()),
            labs=tuple(tx.labs()),
            now_ms=self.clock.now_ms(),
            half_life_ms=self.policy.half_life_ms,
        )
        found = [f"{v.invariant}: {v.detail}" for v in check_world(world)]
        left = [j.id for j in jobs if j.state is not JobState.COMPLETED]
        return (*found, *(f"I2: job {number} never ended" for number in left))


def _at_ms(job: TraceJob) -> int:
    return ZERO_MS + round(job.submit_s * 1000)
