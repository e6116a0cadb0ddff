"""A small installation in virtual time, and a narrator that writes down what happens.

Real engine, in-memory store, simulated machines: golden files in tests/core/golden are
what this narrator says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from dure.adapters.clock import ManualClock
from dure.adapters.compute.simulated import SimRun, SimulatedBackend
from dure.adapters.store.memory import MemoryStore
from dure.core.events import Event, EventName
from dure.core.explain import Explanation, Slots, explain
from dure.core.invariants import World as Truth
from dure.core.invariants import check_world
from dure.core.model import (
    MICRO_PER_TFLOP_S,
    Attempt,
    Evidence,
    Job,
    JobRequest,
    Lab,
    Node,
    Phase,
    Role,
    Tier,
    User,
)
from dure.core.policy import Policy
from dure.engine import commands
from dure.engine.controller import Controller
from dure.engine.engine import Engine
from dure.engine.reconciler import record
from dure.engine.world import World, slots_limit
from dure.ports import LaunchOrder, LeaseKey, Observation, Store
from tests.core.build import R3080TI, R4090

GOLDEN = Path(__file__).parent / "core" / "golden"
HOUR = 3600.0


class Story:
    """Labs, machines and jobs by name; every change is a line."""

    def __init__(
        self,
        nodes: list[Node],
        tiers: list[Tier] | None = None,
        labs: dict[str, float] | None = None,
        policy: Policy | None = None,
        store: Store | None = None,
        journal: Path | None = None,
        slots: int = 100,
    ) -> None:
        self.clock = ManualClock()
        self.start_ms = self.clock.now_ms()
        self.policy = policy or Policy(slots_per_user=slots)
        self.store = store or MemoryStore()
        self.runs: dict[str, SimRun] = {}
        self.jobs: dict[str, int] = {}
        self.lines: list[str] = []
        self.backend = SimulatedBackend(self.clock, nodes, self._script, journal)
        with self.store.write() as tx:
            for tier in tiers or [R4090, R3080TI]:
                tx.put_tier(tier)
            for node in nodes:
                tx.put_node(node)
            for name, usage in (labs or {"BCG": 0.0}).items():
                tx.put_lab(
                    Lab(name=name, usage_micro=usage * MICRO_PER_TFLOP_S, as_of_ms=self.start_ms)
                )
                tx.put_user(User(name=name.lower(), lab=name))
            tx.put_user(User(name="root", lab="BCG", role=Role.ADMIN))
        self.engine = Engine(self.store, self.clock, self.policy, {"simulated": self.backend})
        self.controller = Controller(self.engine, sweep_s=5)
        self._tell_from = 0

    # -- acting --

    def run(self, seconds: float = 1.0, **kw: object) -> SimRun:
        return SimRun(run_ms=round(seconds * 1000), **kw)

    def submit(
        self,
        name: str,
        lab: str,
        num_gpus: int = 1,
        run: SimRun | Callable[[], SimRun] | float = HOUR,
        user: str = "",
        hold: bool = False,
        **request: object,
    ) -> Job:
        self.runs[name] = self.run(run) if isinstance(run, int | float) else run
        asked = JobRequest(name=name, lab=lab, command=("train",), num_gpus=num_gpus, **request)
        job = commands.submit(self.engine, self.user(user or lab.lower()), [asked], hold=hold).jobs[
            0
        ]
        self.jobs[name] = job.id
        self.settle()
        return job

    def user(self, name: str) -> User:
        with self.store.read() as tx:
            found = tx.user(name)
        assert found is not None, name
        return found

    def cancel(self, name: str) -> Job:
        job = commands.cancel(self.engine, self.user("root"), self.jobs[name])
        self.settle()
        return job

    def settle(self) -> None:
        self.controller.sweep()
        self._narrate()

    def wait(self, seconds: float) -> None:
        """Let time pass, stopping wherever something becomes due."""
        end_ms = self.clock.now_ms() + round(seconds * 1000)
        while True:
            due = [
                d for d in (self.backend.next_due_ms(), self.engine.world.index.next_due_ms()) if d
            ]
            step = min([d for d in due if d > self.clock.now_ms()], default=end_ms)
            self.clock.set_ms(min(step, end_ms))
            self.settle()
            if self.clock.now_ms() >= end_ms:
                return

    def node(self, name: str, **changes: object) -> None:
        with self.engine.change("admin") as work:
            old = self.engine.world.pool.nodes[name]
            new = msgspec.structs.replace(old, **changes)
            work.tx.put_node(new)
            work.emit(Event(name=EventName.NODE_CHANGED, at_ms=work.now_ms, node_id=name, node=new))
        self.settle()

    def do(self, command: str, name: str, user: str = "root", **kw: object) -> Job:
        """One command of dure.engine.commands on a job by name."""
        job = getattr(commands, command)(self.engine, self.user(user), self.jobs[name], **kw)
        self.settle()
        return job

    def edit(self, name: str, user: str = "root", /, **changes: object) -> Job:
        return self.do("edit", name, user, change=lambda r: msgspec.structs.replace(r, **changes))

    def record(self, *seen: Observation) -> None:
        """What a backend reports that the simulated one never does."""
        record(self.engine, seen)
        self.settle()

    def restart(self) -> None:
        """A new engine on the same store and machines, as after kill -9."""
        self.engine = Engine(self.store, self.clock, self.policy, {"simulated": self.backend})
        self.controller = Controller(self.engine, sweep_s=5)
        self.settle()

    def phase(self, phase: Phase) -> None:
        with self.engine.change("admin") as work:
            work.tx.put_phase(phase)
            work.emit(Event(name=EventName.MAINTENANCE_CHANGED, at_ms=work.now_ms, phase=phase))
        self.settle()

    # -- looking --

    def job(self, name: str) -> Job:
        with self.store.read() as tx:
            found = tx.job(self.jobs[name])
        assert found is not None
        return found

    def key(self, name: str, epoch: int | None = None) -> LeaseKey:
        return LeaseKey(job=self.jobs[name], epoch=epoch or self.job(name).epoch)

    def attempt(self, name: str, epoch: int | None = None) -> Attempt:
        with self.store.read() as tx:
            found = tx.attempt(self.jobs[name], epoch or self.job(name).epoch)
        assert found is not None
        return found

    def ledger(self, name: str) -> list[tuple[str, int, float]]:
        """(kind, epoch, GPU-seconds) of a job's ledger lines, as booked."""
        with self.store.read() as tx:
            lines = tx.ledger(job=self.jobs[name])
        return [(e.kind.value, e.epoch, e.gpu_ms / 1000) for e in lines]

    def charged(self, name: str) -> float:
        """TFLOP-s that one job has cost."""
        with self.store.read() as tx:
            return sum(e.cost_micro for e in tx.ledger(job=self.jobs[name])) / MICRO_PER_TFLOP_S

    def why(self, name: str) -> Explanation:
        job, world = self.job(name), self.engine.world
        with self.store.read() as tx:
            user = tx.user(job.user)
            assert user is not None
            limit = slots_limit(user, tx.lab(user.lab), self.policy)
            slots = Slots(used=tx.slots_used(job.user), limit=limit)
        return explain(job, world.index, world.pool, world.phase, slots, self.policy)

    def reason(self, name: str) -> str:
        return self.why(name).reason.code.value

    def reasons(self, name: str) -> set[str]:
        told = self.why(name)
        return {r.code.value for r in (told.reason, *told.more)}

    def events(self, name: str = "") -> list[str]:
        with self.store.read() as tx:
            job = self.jobs[name] if name else None
            return [e.name.value for e in tx.events(job=job, limit=100_000)]

    def state(self, name: str) -> str:
        return self.job(name).state.value

    def usage(self, lab: str) -> float:
        """Charged so far in TFLOP-s, undecayed, from the ledger."""
        with self.store.read() as tx:
            return sum(e.cost_micro for e in tx.ledger(lab=lab)) / MICRO_PER_TFLOP_S

    def lab_usage(self, lab: str) -> float:
        with self.store.read() as tx:
            return tx.lab(lab).usage_micro / MICRO_PER_TFLOP_S

    def order(self) -> list[str]:
        names = {v: k for k, v in self.jobs.items()}
        world = self.engine.world
        return [names[v.id] for v in world.index.ranked(world.pool)]

    def truth(self) -> Truth:
        with self.store.read() as tx:
            return Truth(
                jobs=tuple(tx.all_jobs()),
                attempts=tuple(tx.all_attempts()),
                ledger=tuple(tx.ledger()),
                labs=(),
                now_ms=self.clock.now_ms(),
                half_life_ms=self.policy.half_life_ms,
            )

    def check(self) -> None:
        """The stored truth holds every invariant, and the folded world is the stored one."""
        assert check_world(self.truth()) == []
        fresh = World(self.policy)
        with self.store.read() as tx:
            fresh.load(tx, self.engine.world.index.now_ms)
        assert folded(self.engine.world) == folded(fresh)

    # -- telling --

    def say(self, sentence: str) -> None:
        self.lines.append(f"\n# {sentence}")

    def _script(self, order: LaunchOrder) -> SimRun:
        run = self.runs.get(order.name) or self.run(100)
        return run() if callable(run) else run

    def _narrate(self) -> None:
        with self.store.read() as tx:
            events = tx.events(after=self._tell_from, limit=10_000)
        names = {v: k for k, v in self.jobs.items()}
        for e in events:
            self._tell_from = e.id
            at_s = (e.at_ms - self.start_ms) / 1000
            who = f"{names.get(e.job, e.job)} ({e.lab_id})" if e.job else ""
            more = " ".join(f"{k}={v}" for k, v in e.params.items())
            if e.lab is not None and e.name is EventName.LAB_CHARGED:
                with self.store.read() as tx:
                    cost = sum(x.cost_micro for x in tx.ledger(lab=e.lab_id)) / MICRO_PER_TFLOP_S
                who, more = e.lab_id, f"charged in all {cost:,.6g} TFLOP-s"
            elif e.node is not None:
                who = f"{e.node.name} health={e.node.health.value} drained={e.node.drained}"
            elif e.phase is not None:
                who = e.phase.value
            gpus = f" gpus={list(e.taken.gpus)}" if e.taken else ""
            self.lines.append(f"{at_s:>9,.0f}s  {e.name.value:<22} {who}{gpus} {more}".rstrip())

    def golden(self, name: str) -> None:
        """Compare what was told with tests/core/golden/NAME.txt; DURE_GOLDEN=write rewrites it."""
        self.check()
        told = "\n".join(self.lines).strip("\n") + "\n"
        path = GOLDEN / f"{name}.txt"
        if os.environ.get("DURE_GOLDEN") == "write":
            path.write_text(told)
        assert told == path.read_text(), f"{path} differs; DURE_GOLDEN=write rewrites it"


def folded(world: World) -> dict[str, object]:
    """All of a world that decides anything, to compare a fold with a fresh load."""
    return {
        "order": [v.id for v in world.index.ranked(world.pool)],
        "views": sorted(world.index.ranked(world.pool), key=lambda v: v.id),
        "holders": sorted(v.id for v in world.index.holders()),
        "leases": dict(sorted(world.pool.leases.items())),
        "placements": world.pool.views(world.index.now_ms),
        "presence": world.index.presence_changes(world.pool),
        "labs": dict(sorted(world.labs.items())),
        "phase": world.phase,
        "events": world.last_event_id,
    }


CUDA_OOM = Evidence(
    exit_code=1,
    stderr_tail="Traceback (most recent call last):\n"
    '  File "train.py", line 9, in <module>\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
)
