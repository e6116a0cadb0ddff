"""Anything in any order: after every step the invariants hold and the fold is the truth."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dure.adapters.compute.simulated import SimRun, SimulatedBackend
from dure.core.errors import DureError
from dure.core.invariants import check_world
from dure.core.model import (
    PROMOTED_WAIT,
    RETRYABLE,
    Evidence,
    JobState,
    NodeHealth,
    Phase,
    Retry,
    RetryOn,
)
from dure.engine import admin, commands
from dure.ports import Beat, Exited, LeaseExpired, LeaseKey, Resumed, Returned
from tests.core.build import R3080TI, R4090, R5090, node
from tests.story import CUDA_OOM, Story, folded

NODES = [
    node("n1", (R4090, 2)),
    node("n2", (R4090, 1), (R3080TI, 2)),
    node("n3", (R5090, 3), memory_mib=9_000),
]
TIERS = [R4090, R3080TI, R5090]
SLOTS = 3
ENDS = [
    Evidence(exit_code=0),
    Evidence(exit_code=0),
    Evidence(exit_code=1),
    Evidence(exit_code=0, timed_out=True),
    Evidence(signal=9, oom_kill=1),
    CUDA_OOM,
]
WHEN = st.sampled_from([1, 7, 30, 61, 300, 1_801, 100_000])
PICK = st.integers(0, 10**6)


class Anything(RuleBasedStateMachine):
    """The engine with its commands, its machines, their losses, and its own death."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.fates: dict[tuple[int, int], SimRun] = {}
        self.fate = SimRun(run_ms=30_000)
        self.story = Story(
            NODES, TIERS, {"BCG": 0.0, "KDG": 0.0}, slots=SLOTS, journal=self.folder / "journal"
        )
        self.story.backend._script = self.script

    def teardown(self) -> None:
        self.story.backend.close()
        shutil.rmtree(self.folder)

    def script(self, order) -> SimRun:
        return self.fates.setdefault((order.key.job, order.key.epoch), self.fate)

    def pick(self, number: int, states=tuple(JobState)) -> int | None:
        with self.story.store.read() as tx:
            ids = [j.id for j in tx.all_jobs() if j.state in states]
        return ids[number % len(ids)] if ids else None

    def command(self, command, number: int, *args: object) -> None:
        job = self.pick(number)
        if job is not None:
            with contextlib.suppress(DureError):
                command(self.story.engine, self.story.user("root"), job, *args)
            self.story.settle()

    # -- users --

    @rule(
        lab=st.sampled_from(["BCG", "KDG"]),
        gpus=st.integers(1, 3),
        tiers=st.sampled_from([(), (), ("RTX4090",), ("RTX3080Ti", "RTX5090")]),
        seconds=st.sampled_from([5, 30, 900]),
        start=st.sampled_from([0, 0, 40]),
        linger=st.sampled_from([0, 0, 20]),
        refuse=st.sampled_from(["", "", "", "no room"]),
        end=st.sampled_from(ENDS),
        on=st.sampled_from(list(RetryOn)),
        hold=st.booleans(),
    )
    def submit(self, lab, gpus, tiers, seconds, start, linger, refuse, end, on, hold) -> None:
        self.fate = SimRun(
            start_ms=start * 1_000,
            run_ms=seconds * 1_000,
            linger_ms=linger * 1_000,
            refuse=refuse,
            evidence=end,
            save_ms=seconds * 500,
        )
        s = self.story
        with contextlib.suppress(DureError):
            s.submit(
                f"j{len(s.jobs)}",
                lab,
                gpus,
                hold=hold and gpus == 2,
                tiers=tiers,
                retry=Retry(on=on),
            )

    @rule(number=PICK)
    def cancel(self, number) -> None:
        self.command(commands.cancel, number)

    @rule(number=PICK)
    def hold(self, number) -> None:
        self.command(commands.hold, number)

    @rule(number=PICK)
    def release(self, number) -> None:
        self.command(commands.release, number)

    @rule(number=PICK)
    def retry(self, number) -> None:
        job = self.pick(number, tuple(RETRYABLE))
        if job is not None:
            self.command(lambda e, u, _: commands.retry(e, u, job), number)

    @rule(number=PICK, gpus=st.integers(1, 3), vram=st.sampled_from([0.0, 13.0, 25.0]))
    def edit(self, number, gpus, vram) -> None:
        change = {"num_gpus": gpus, "min_vram_gb": vram}
        self.command(commands.edit, number, lambda r: msgspec.structs.replace(r, **change))

    # -- time and machines --

    @rule(seconds=WHEN)
    def wait(self, seconds) -> None:
        self.story.wait(seconds)

    @rule(name=st.sampled_from([n.name for n in NODES]), health=st.sampled_from(list(NodeHealth)))
    def health(self, name, health) -> None:
        self.story.node(name, health=health, last_seen_ms=self.story.clock.now_ms() - 5_000)

    @rule(name=st.sampled_from([n.name for n in NODES]), drained=st.booleans(), force=st.booleans())
    def drain(self, name, drained, force) -> None:
        admin.drain(self.story.engine, "root", name, drained=drained, reason="", force=force)
        self.story.settle()

    @rule(
        number=PICK, kind=st.sampled_from(["off", "off", "stable", "bye", "back", "late", "beat"])
    )
    def report(self, number, kind) -> None:
        """A report of some attempt, current or not, twice as often of one that is open."""
        s = self.story
        with s.store.read() as tx:
            some = [*tx.open_attempts(), *tx.open_attempts(), *tx.all_attempts()]
        if not some:
            return
        attempt = some[number % len(some)]
        key, at_ms = LeaseKey(job=attempt.job, epoch=attempt.epoch), s.clock.now_ms()
        s.record(
            {
                "off": LeaseExpired(key=key, at_ms=at_ms, node_state=NodeHealth.OFFLINE),
                "stable": LeaseExpired(key=key, at_ms=at_ms, node_state=NodeHealth.STABLE),
                "bye": Returned(key=key, at_ms=at_ms),
                "back": Resumed(key=key, at_ms=at_ms),
                "late": Exited(key=key, at_ms=at_ms, evidence=ENDS[number % len(ENDS)]),
                "beat": Beat(key=key, at_ms=at_ms),
            }[kind]
        )

    @rule(gpus=st.integers(1, 3), active=st.booleans())
    def tier(self, gpus, active) -> None:
        changed = msgspec.structs.replace(R4090, max_gpus=gpus, active=active)
        admin.put_tier(self.story.engine, "root", changed)
        self.story.settle()

    @rule(down=st.booleans())
    def maintenance(self, down) -> None:
        try:
            phase = Phase.DRAINING if down else Phase.NORMAL
            admin.set_phase(self.story.engine, "root", phase)
        except DureError:
            pass
        self.story.settle()

    @rule(back_s=st.sampled_from([0, 0, 3, 4_000]))
    def die_and_come_back(self, back_s) -> None:
        """Server and machines lose their memory; store and journal stay; clocks may differ."""
        s = self.story
        s.backend.close()
        s.clock.advance(-back_s)
        s.backend = SimulatedBackend(s.clock, NODES, self.script, self.folder / "journal")
        s.restart()

    @precondition(lambda self: len(self.story.jobs) > 1)
    @rule()
    def nothing_changes_without_a_cause(self) -> None:
        s = self.story
        s.settle()  # what a fence has ended is seen by the sweep after it
        before = s.truth()
        s.controller.sweep()
        after = s.truth()
        assert before.jobs == after.jobs
        assert before.ledger == after.ledger

    # -- always --

    @invariant()
    def the_invariants_hold(self) -> None:
        truth = self.story.truth()
        with self.story.store.read() as tx:
            truth = msgspec.structs.replace(truth, labs=tuple(tx.labs()))
        assert check_world(truth, {"bcg": SLOTS, "kdg": SLOTS}) == []

    @invariant()
    def the_fold_is_the_stored_truth(self) -> None:
        self.story.check()
        world = self.story.engine.world
        assert folded(world)["presence"] == ([], [])
        places = {v.id: v for v in world.pool.views(world.index.now_ms)}
        head = next(world.index.ranked(world.pool), None)
        for holder in world.index.holders():
            assert head is not None
            assert holder.id == head.id
            assert len(places[holder.reservation.placement].free) >= holder.reservation.count

    @invariant()
    def every_waiting_job_has_a_reason(self) -> None:
        for name in self.story.jobs:
            job = self.story.job(name)
            if job.state in PROMOTED_WAIT or job.state is JobState.PERSONAL_QUEUE_WAIT:
                assert self.story.reason(name)


Anything.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAnything = Anything.TestCase
