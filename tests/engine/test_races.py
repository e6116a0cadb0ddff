"""What happens between a plan and its application, and between one batch and the next."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from dure.core.errors import IllegalTransition
from dure.core.lifecycle import JobEvent
from dure.core.model import (
    Evidence,
    Gpu,
    JobRequest,
    JobState,
    Limits,
    NodeHealth,
    Phase,
    User,
)
from dure.core.plan import Plan, Snapshot
from dure.core.scheduler import plan
from dure.engine import admin, commands, reconciler
from dure.engine.applier import apply
from dure.engine.controller import Controller
from dure.engine.faultpoints import POINTS, install
from dure.engine.reconciler import collect, record
from dure.ports import Exited, Freed, GpuChanged, LeaseExpired, NodeChanged, Started
from tests.core.build import BIG4090, R3080TI, R4090, node
from tests.story import HOUR, Story

TIERS = ("RTX4090",)


def planned(s: Story) -> tuple[Snapshot, Plan]:
    """A plan of now that is not applied yet; reports of the machines are in."""
    collect(s.engine, s.controller._cursors)
    world = s.engine.world
    world.index.advance(s.clock.now_ms())
    snapshot = world.index.snapshot(world.pool, 1, world.phase)
    return snapshot, plan(snapshot, s.engine.policy)


def kinds(made: Plan) -> list[str]:
    return [type(d).__name__ for d in made.decisions]


def waiting(*jobs: tuple[str, str, int], busy_s: float = 50, gpus: int = 2) -> Story:
    """Jobs that wait for a busy node whose GPUs have just become idle."""
    s = Story([node("n1", (BIG4090, gpus))], tiers=[BIG4090], labs={"BCG": 0, "KDG": 5, "OSL": 1e6})
    s.submit("busy", "OSL", gpus, run=busy_s)
    for name, lab, n in jobs:
        s.submit(name, lab, n, run=100)
    s.clock.advance(busy_s)
    return s


@pytest.mark.parametrize("act", ["cancel", "hold", "edit"])
def test_a_command_between_plan_and_apply_wins(act: str) -> None:
    s = waiting(("a", "BCG", 2), ("b", "KDG", 2))
    snapshot, made = planned(s)
    assert kinds(made) == ["Dispatch"]
    root, job = s.user("root"), s.jobs["a"]
    if act == "edit":
        commands.edit(s.engine, root, job, lambda r: msgspec.structs.replace(r, num_gpus=1))
    else:
        getattr(commands, act)(s.engine, root, job)
    assert apply(s.engine, snapshot, made).kept == 0
    assert s.job("a").epoch == 0
    s.settle()
    assert s.state("a" if act == "edit" else "b") == "RUNNING"
    s.check()


def test_after_a_refused_decision_nothing_later_of_that_plan_is_done() -> None:
    """I4: what was planned for b is what a, as it is now, could start on."""
    s = waiting(("a", "BCG", 2), ("b", "KDG", 1), gpus=3)
    snapshot, made = planned(s)
    assert kinds(made) == ["Dispatch", "Dispatch"]
    commands.edit(
        s.engine, s.user("root"), s.jobs["a"], lambda r: msgspec.structs.replace(r, tiers=TIERS)
    )
    assert apply(s.engine, snapshot, made).kept == 0
    s.settle()
    assert [s.state(n) for n in "ab"] == ["RUNNING", "RUNNING"]
    s.check()


def test_reserved_gpus_are_not_given_away_when_their_release_is_refused() -> None:
    """The holder was edited between the plan that released it and its application."""
    s = Story([node("n1", (R4090, 2))], labs={"BCG": 0, "KDG": 5, "OSL": 1e9})
    s.submit("busy", "OSL", run=9_000)
    s.submit("pair", "BCG", 2, run=100)
    assert s.job("pair").reservation.count == 1
    admin.put_lab(s.engine, "root", "BCG", opening_tflop_s=1e9)
    commands.submit(
        s.engine,
        s.user("kdg"),
        [JobRequest(name="k", lab="KDG", command=("x",))],
    )
    snapshot, made = planned(s)
    assert kinds(made) == ["Release", "Dispatch"]
    commands.edit(
        s.engine, s.user("root"), s.jobs["pair"], lambda r: msgspec.structs.replace(r, tiers=TIERS)
    )
    assert apply(s.engine, snapshot, made).kept == 0
    assert s.job("pair").reservation.count == 1
    s.settle()
    assert s.job("pair").reservation is None
    assert s.state("pair") == "GLOBAL_QUEUE_WAIT"
    with s.store.read() as tx:
        assert tx.job(max(s.jobs.values()) + 1).state is JobState.RUNNING
    s.check()


def test_maintenance_between_plan_and_apply_dispatches_nothing() -> None:
    """I7: a plan of NORMAL is not applied in DRAINING, but its releases are."""
    s = waiting(("a", "BCG", 2))
    snapshot, made = planned(s)
    admin.set_phase(s.engine, "root", Phase.DRAINING)
    assert apply(s.engine, snapshot, made).kept == 0
    assert s.job("a").epoch == 0
    s.check()


@pytest.mark.parametrize(
    "change",
    [{"drained": True}, {"health": NodeHealth.SUSPECTED}, {"ready": False}, {"gpus": ()}],
)
def test_a_node_that_changes_between_plan_and_apply_gets_nothing(change) -> None:
    s = waiting(("a", "BCG", 2))
    snapshot, made = planned(s)
    changed = msgspec.structs.replace(s.engine.world.pool.nodes["n1"], **change)
    record(s.engine, [NodeChanged(node=changed)])
    if "drained" in change:
        admin.drain(s.engine, "root", "n1", drained=True, reason="")
    assert apply(s.engine, snapshot, made).kept == 0
    s.settle()
    assert s.job("a").epoch == 0
    s.check()


def test_a_gpu_that_falls_sick_between_plan_and_apply_is_not_used() -> None:
    s = waiting(("a", "BCG", 2))
    snapshot, made = planned(s)
    sick = Gpu(index=1, tier="RTX4090", healthy=False)
    record(s.engine, [GpuChanged(node="n1", gpu=sick)])
    assert apply(s.engine, snapshot, made).kept == 0
    s.check()


def test_the_same_plan_applied_twice_dispatches_once() -> None:
    s = waiting(("a", "BCG", 2))
    snapshot, made = planned(s)
    assert apply(s.engine, snapshot, made).kept == 1
    assert apply(s.engine, snapshot, made).kept == 0
    assert s.job("a").epoch == 1
    s.check()


def test_a_cancel_between_intent_and_launch_ends_the_job_and_starts_nothing_for_long() -> None:
    s = waiting(("a", "BCG", 2))
    snapshot, made = planned(s)
    hit: list[str] = []

    def cancel_once(point: str) -> None:
        if point == "dispatch.after_commit" and not hit:
            hit.append(point)
            commands.cancel(s.engine, s.user("root"), s.jobs["a"])

    install(cancel_once)
    try:
        apply(s.engine, snapshot, made)
    finally:
        install(None)
    assert s.state("a") == "CANCELLING"
    s.settle()
    s.wait(1)
    assert s.state("a") == "CANCELLED"
    s.check()


def test_two_gpus_of_a_node_that_change_in_one_batch_are_both_changed() -> None:
    s = Story([node("n1", (BIG4090, 4))], tiers=[BIG4090])
    suspected = msgspec.structs.replace(
        s.engine.world.pool.nodes["n1"], health=NodeHealth.SUSPECTED
    )
    sick = [
        GpuChanged(node="n1", gpu=Gpu(index=i, tier="RTX4090", healthy=False)) for i in (0, 1, 3)
    ]
    s.record(NodeChanged(node=suspected), *sick)
    known = s.engine.world.pool.nodes["n1"]
    assert [g.healthy for g in known.gpus] == [False, False, True, False]
    assert known.health is NodeHealth.SUSPECTED
    s.check()


def test_what_an_administrator_said_of_a_node_outlives_its_reports() -> None:
    s = Story([node("n1", (R4090, 1))])
    admin.drain(s.engine, "root", "n1", drained=True, reason="fan")
    s.record(NodeChanged(node=node("n1", (R4090, 1))))
    known = s.engine.world.pool.nodes["n1"]
    assert (known.drained, known.drain_reason) == (True, "fan")


def test_start_end_and_free_in_one_batch_are_one_whole_attempt() -> None:
    s = Story([node("n1", (R4090, 1))], slots=1)
    s.submit("a", "BCG", run=s.run(100, start_ms=0))
    s.submit("b", "BCG", run=50)
    s.clock.advance(5_000)
    s.settle()
    assert s.ledger("a") == [("run", 1, 100)]
    assert s.state("b") == "RUNNING"
    s.check()


def test_s6_fifty_jobs_of_one_lab_end_in_the_same_millisecond() -> None:
    s = Story([node(f"n{i}", (BIG4090, 10)) for i in range(5)], tiers=[BIG4090])
    for i in range(50):
        s.submit(f"j{i}", "BCG", run=100)
    s.wait(100)
    assert s.usage("BCG") == 50 * 8_260
    assert s.lab_usage("BCG") == pytest.approx(50 * 8_260, rel=1e-12)
    s.check()


def test_an_impossible_report_is_refused_and_keeps_no_other_out(monkeypatch) -> None:
    s = Story([node("n1", (R4090, 2))])
    s.submit("a", "BCG", run=HOUR)
    s.submit("b", "BCG", run=HOUR)
    real = reconciler.conclude

    def refuses(job, *args):
        if job.id == s.jobs["a"]:
            raise IllegalTransition(job.state.value, JobEvent.COMPLETED.value)
        return real(job, *args)

    monkeypatch.setattr(reconciler, "conclude", refuses)
    done = Evidence(exit_code=0)
    s.record(*(Exited(key=s.key(n), at_ms=s.clock.now_ms(), evidence=done) for n in "ab"))
    assert [s.state(n) for n in "ab"] == ["RUNNING", "COMPLETED"]


# -- the loop -----------------------------------------------------------------------------


def wait_until(true, seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.005)
    return False


def test_in_draining_with_running_jobs_the_loop_rests() -> None:
    """It must not wake itself: a day of draining is not a day of a whole core."""
    s = Story([node("n1", (R4090, 1))])
    s.submit("a", "BCG", run=HOUR)
    s.phase(Phase.DRAINING)
    s.controller.start()
    try:
        assert wait_until(lambda: not s.controller._wake.is_set())
        turns, real = [], s.controller.turn
        s.controller.turn = lambda: turns.append(1) or real()
        s.engine.wake()
        time.sleep(0.1)
        assert len(turns) <= 3
    finally:
        s.controller.stop()
    assert s.engine.world.phase is Phase.DRAINING


def test_hints_without_a_pause_do_not_keep_the_sweep_away() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("early", "BCG", run=10, not_before_ms=s.clock.now_ms() + 60_000)
    s.controller.start()
    stop = threading.Event()

    def hints() -> None:
        while not stop.is_set():
            s.clock.advance(1)
            s.engine.wake()
            time.sleep(0.001)

    noise = threading.Thread(target=hints)
    noise.start()
    try:
        assert wait_until(lambda: s.job("early").epoch > 0)
    finally:
        stop.set()
        noise.join()
        s.controller.stop()


def test_a_backoff_that_is_over_wakes_the_loop_by_itself() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.controller = Controller(s.engine, sweep_s=5)
    s.submit("a", "BCG", run=s.run(1, refuse="no room"))
    assert s.engine.world.index.next_due_ms() == s.clock.now_ms() + 60_000
    s.clock.advance(59.9)
    assert s.controller._patience_s() == pytest.approx(0.1)


# -- restarts ------------------------------------------------------------------------------


class Died(BaseException):
    """kill -9, as far as one thread can tell."""


@pytest.mark.parametrize("point", POINTS)
def test_death_at_any_point_loses_nothing_that_was_promised(point: str) -> None:
    """I9 in one process; tests/engine/test_kill.py does it with real processes."""
    for passing in (1, 2, 5):
        s = Story(
            [node("n1", (R4090, 2)), node("n2", (R3080TI, 1))], slots=3, labs={"BCG": 0, "KDG": 5}
        )
        left = [passing]

        def dies(reached: str, left=left, point=point) -> None:
            left[0] -= reached == point
            if reached == point and left[0] == 0:
                raise Died

        root = s.user("root")
        acts = [
            lambda s=s: s.submit("a", "BCG", run=20),
            lambda s=s: s.submit("pair", "BCG", 2, run=30),
            lambda s=s: s.submit("bad", "KDG", run=s.run(5, evidence=Evidence(exit_code=1))),
            lambda s=s: s.submit("no", "KDG", run=s.run(5, refuse="x")),
            lambda s=s: s.submit("held", "BCG", run=3, hold=True),
            lambda s=s: s.wait(7),
            lambda s=s: s.do("retry", "bad"),
            lambda s=s: s.do("release", "held"),
            lambda s=s: s.do("hold", "pair"),
            lambda s=s: s.edit("pair", name="pair"),
            lambda s=s: s.do("release", "pair"),
            lambda s=s: s.node("n1", health=NodeHealth.SUSPECTED),
            lambda s=s: s.node("n1", health=NodeHealth.STABLE),
            lambda s=s, root=root: commands.reorder(s.engine, root, []),
            lambda s=s: s.cancel("a"),
            lambda s=s: s.wait(400),
        ]
        install(dies)
        try:
            for act in acts:
                try:
                    act()
                except Died:
                    s.restart()
                except (KeyError, commands.DureError):
                    pass  # it was never accepted, or has ended already
        finally:
            install(None)
        s.restart()
        s.node("n1", health=NodeHealth.STABLE)  # its return may have been what died
        s.wait(2_000)
        s.check()
        with s.store.read() as tx:
            assert not [j for j in tx.live_jobs() if not j.held]
            assert tx.open_attempts() == []


def test_s7_a_death_between_end_and_charge_is_charged_once_over_ten_restarts() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("a", "BCG", run=100)

    def dies(reached: str) -> None:
        if reached == "record.before_commit":
            raise Died

    s.clock.advance(100)
    for _ in range(10):
        install(dies)
        with pytest.raises(Died):
            s.controller.sweep()
        install(None)
        s.engine = s.engine.__class__(s.store, s.clock, s.policy, s.engine.backends)
        s.controller = Controller(s.engine, sweep_s=5)
        assert s.usage("BCG") == 0
    for _ in range(10):
        s.restart()
    assert s.ledger("a") == [("run", 1, 100)]
    assert s.lab_usage("BCG") == pytest.approx(8_260)
    s.check()


def test_s37_a_restart_in_draining_starts_nothing() -> None:
    s = Story([node("n1", (R4090, 2))])
    s.submit("a", "BCG", run=100)
    s.submit("pair", "BCG", 2, run=10)
    s.phase(Phase.DRAINING)
    for _ in range(5):
        s.restart()
    assert (s.engine.world.phase, s.job("pair").epoch) == (Phase.DRAINING, 0)
    s.wait(100)
    s.restart()
    assert (s.engine.world.phase, s.job("pair").epoch) == (Phase.ACTIVE, 0)
    s.check()


def test_a_lease_the_backend_has_forgotten_is_closed_and_the_job_repeated() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("a", "BCG", run=HOUR)
    s.wait(700)
    s.backend.fence([s.key("a")])
    s.settle()
    assert (s.job("a").retries, s.reason("a")) == (1, "RETRY_BACKOFF")
    assert s.attempt("a").freed_ms == s.clock.now_ms()
    s.check()


def test_a_reservation_survives_a_restart_to_the_millisecond() -> None:
    s = Story([node("n1", (R4090, 2))])
    s.submit("busy", "BCG", run=100)
    s.submit("pair", "BCG", 2, run=10)
    for _ in range(4):
        s.wait(25)
        s.restart()
    s.wait(10)
    assert s.ledger("pair") == [("run", 1, 20), ("reserved", 1, 100)]
    s.check()


def test_the_world_that_missed_events_catches_up() -> None:
    s = Story([node("n1", (R4090, 1))])
    other = Story([node("n1", (R4090, 1))], store=s.store)
    s.submit("a", "BCG", run=100)
    other.clock.set_ms(s.clock.now_ms())
    other.controller.sweep()
    s.check()


def test_a_weight_a_limit_and_a_lab_change_move_the_order_at_once() -> None:
    """S22: no decay run is needed; S11: changing settings charges nobody."""
    s = Story([node("n1", (R4090, 1))], labs={"BCG": 10, "KDG": 20, "OSL": 1e9})
    s.submit("busy", "OSL", run=HOUR)
    s.submit("b", "BCG", run=10)
    s.submit("k", "KDG", run=10)
    assert s.order() == ["b", "k"]
    admin.put_lab(s.engine, "root", "KDG", weight=10.0)
    assert s.order() == ["k", "b"]
    admin.put_lab(s.engine, "root", "KDG", weight=10.0, limits=Limits(num_gpus=0))
    assert s.order() == ["b"]
    admin.put_lab(s.engine, "root", "KDG", weight=10.0)
    admin.put_user(s.engine, "root", User(name="kdg", lab="BCG"))
    assert s.order() == ["k", "b"]
    assert s.truth().ledger == ()
    s.check()


def test_a_stale_start_does_not_run_a_newer_attempt() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (R4090, 1))])
    s.submit("a", "BCG", run=s.run(100, start_ms=10**7))
    s.node("n1", health=NodeHealth.OFFLINE)
    old = s.key("a")
    s.record(LeaseExpired(key=old, at_ms=s.clock.now_ms(), node_state=NodeHealth.OFFLINE))
    assert s.job("a").epoch == 2
    s.record(Started(key=old, at_ms=s.clock.now_ms()))
    assert s.state("a") == "DISPATCHED"
    s.record(Freed(key=old, at_ms=s.clock.now_ms()))
    assert s.state("a") == "DISPATCHED"
    s.check()
