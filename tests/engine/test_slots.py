"""Slots and order under haste, restarts and clocks that step back."""

from __future__ import annotations

import math
import threading

import pytest

from dure.core.errors import DureError
from dure.core.fairshare import decayed_micro
from dure.core.model import SLOT_STATES, Evidence, JobRequest, Limits, NodeHealth, User
from dure.engine import admin, commands
from dure.ports import Exited, Freed, Started
from tests.core.build import BIG4090, R4090, node
from tests.story import Story

HOUR_MS = 3_600_000


def used(s: Story, user: str = "bcg") -> int:
    with s.store.read() as tx:
        return sum(j.state in SLOT_STATES for j in tx.all_jobs() if j.user == user)


def asked(name: str = "t", lab: str = "BCG") -> JobRequest:
    return JobRequest(name=name, lab=lab, command=("true",))


def test_a_thousand_promotions_ends_and_submits_at_once_never_exceed_a_users_slots() -> None:
    """S6, S20: also the charges of jobs that end in the same moment are all there."""
    s = Story([node("n1", (BIG4090, 8))], tiers=[BIG4090], slots=3, labs={"BCG": 0, "KDG": 0})
    seen: list[int] = []
    s.store.subscribe(lambda _: seen.append(max(used(s), used(s, "kdg"))))
    stop = threading.Event()
    errors: list[BaseException] = []

    def guarded(act) -> None:
        try:
            act()
        except DureError:
            pass
        except BaseException as error:  # noqa: BLE001 - a thread's failure must fail the test
            errors.append(error)

    def submits(lab: str) -> None:
        user = s.user(lab.lower())
        for i in range(250):
            guarded(lambda i=i: commands.submit(s.engine, user, [asked(f"{i}", lab)] * 2))

    def meddle(command) -> None:
        for job in range(1, 500, 2):
            guarded(lambda job=job: command(s.engine, s.user("root"), job))

    def ends() -> None:
        while not stop.is_set():
            s.clock.advance(200)
            guarded(s.controller.turn)

    threads = [
        *(threading.Thread(target=submits, args=(lab,)) for lab in ("BCG", "KDG")),
        *(
            threading.Thread(target=meddle, args=(c,))
            for c in (commands.cancel, commands.hold, commands.release)
        ),
    ]
    loop = threading.Thread(target=ends)
    for t in (*threads, loop):
        t.start()
    for t in threads:
        t.join()
    stop.set()
    loop.join()
    assert errors == []
    with s.store.read() as tx:
        for job in [j.id for j in tx.live_jobs() if j.held]:
            commands.release(s.engine, s.user("root"), job)
    for _ in range(800):
        s.wait(100)
        if not any(used(s, u) for u in ("bcg", "kdg")):
            break
    assert max(seen) <= 3
    with s.store.read() as tx:
        assert len(list(tx.all_jobs())) == 1_000
        assert not list(tx.live_jobs())
    s.check()


def test_a_freed_slot_promotes_the_next_at_once_and_sets_its_entry_time() -> None:
    s = Story([node("n1", (R4090, 2))], slots=1)
    s.submit("a", "BCG", run=100)
    s.submit("b", "BCG", run=100)
    assert s.job("b").entered_ms == 0
    s.wait(100)
    assert (s.state("b"), s.job("b").entered_ms) == ("RUNNING", s.clock.now_ms())


def test_a_cancelling_job_still_takes_its_slot() -> None:
    s = Story([node("n1", (R4090, 2))], slots=1)
    s.submit("a", "BCG", run=s.run(900, save_ms=30_000))
    s.submit("b", "BCG", run=100)
    s.cancel("a")
    assert s.state("b") == "PERSONAL_QUEUE_WAIT"
    s.wait(30)
    assert s.state("b") == "RUNNING"


def test_a_waiting_job_of_an_absent_node_and_a_repeat_keep_their_slots() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (BIG4090, 1), drained=True)], slots=1)
    s.submit("a", "BCG", run=9, node="n2")
    s.submit("b", "BCG", run=9)
    assert [s.state(x) for x in "ab"] == ["NODE_WAIT", "PERSONAL_QUEUE_WAIT"]
    assert s.reason("b") == "PERSONAL_LIMIT"


@pytest.mark.parametrize(
    ("lab", "user", "limit"), [(None, None, 4), (2, None, 2), (2, 3, 3), (None, 1, 1), (5, 0, 0)]
)
def test_user_over_lab_over_default(lab, user, limit) -> None:
    s = Story([node("n1", (BIG4090, 8))], tiers=[BIG4090], slots=4)
    admin.put_lab(s.engine, "root", "BCG", limits=Limits(slots=lab))
    admin.put_user(s.engine, "root", User(name="bcg", lab="BCG", limits=Limits(slots=user)))
    for i in range(6):
        s.submit(f"j{i}", "BCG", run=900)
    assert used(s) == limit


def test_a_limit_lowered_below_use_stops_nothing_and_promotes_nothing() -> None:
    s = Story([node("n1", (BIG4090, 8))], tiers=[BIG4090], slots=4)
    for i in range(6):
        s.submit(f"j{i}", "BCG", run=100 + i)
    admin.put_user(s.engine, "root", User(name="bcg", lab="BCG", limits=Limits(slots=1)))
    s.settle()
    assert used(s) == 4
    s.wait(101)
    assert used(s) == 2
    assert s.state("j4") == "PERSONAL_QUEUE_WAIT"
    s.wait(2)
    assert s.state("j4") == "RUNNING"


def test_s17_a_thousand_equal_jobs_keep_their_order_over_restarts() -> None:
    s = Story([node("n1", (R4090, 1))], slots=1_000)
    s.submit("busy", "BCG", run=10**6)
    made = commands.submit(s.engine, s.user("bcg"), [asked()] * 999).jobs
    order = [j.id for j in made]
    for _ in range(3):
        s.restart()
        world = s.engine.world
        assert [v.id for v in world.index.ranked(world.pool)] == order


def test_equal_jobs_start_in_the_order_they_came_also_after_a_restart() -> None:
    s = Story([node("n1", (R4090, 1))], slots=2)
    for i in range(12):
        s.submit(f"j{i:02d}", "BCG", run=10)
    for _ in range(12):
        s.wait(10)
        s.restart()
    assert [o.name for o in s.backend.launches] == [f"j{i:02d}" for i in range(12)]
    s.check()


# -- clocks and sizes ------------------------------------------------------------------


@pytest.mark.parametrize("usage", [0, *(10.0**e for e in range(-6, 19, 4)), 1e18])
def test_any_usage_is_ordered_charged_and_never_nan(usage: float) -> None:
    s = Story([node("n1", (R4090, 1))], labs={"BCG": usage, "KDG": 1e5})
    s.submit("busy", "KDG", run=100)
    s.submit("k", "KDG", run=5)
    s.submit("b", "BCG", run=5)
    assert s.order() == (["b", "k"] if usage < 1e5 else ["k", "b"])
    s.wait(500)
    assert s.lab_usage("BCG") >= usage * 0.999
    assert math.isfinite(s.lab_usage("BCG"))
    s.check()


def test_s9_a_lab_idle_for_five_years_has_no_nan_and_goes_first() -> None:
    s = Story([node("n1", (R4090, 1))], labs={"BCG": 1e18, "KDG": 1})
    s.clock.advance(5 * 365 * 86_400)
    s.submit("busy", "KDG", run=100)
    s.submit("k", "KDG", run=5)
    s.submit("b", "BCG", run=5)
    s.wait(100)
    with s.store.read() as tx:
        left = decayed_micro(tx.lab("BCG"), s.clock.now_ms(), s.policy.half_life_ms)
    assert 0 < left < 1e18
    assert s.state("b") == "RUNNING"
    s.wait(20)
    s.check()


def test_a_clock_that_steps_back_while_jobs_run_makes_no_negative_charge() -> None:
    s = Story([node("n1", (R4090, 2))], labs={"BCG": 0, "KDG": 0})
    s.submit("a", "BCG", run=s.run(100, linger_ms=50_000))
    s.submit("pair", "KDG", 2, run=100)
    s.wait(60)
    s.clock.set_ms(s.clock.now_ms() - HOUR_MS)
    key, now = s.key("a"), s.clock.now_ms()
    s.record(
        Started(key=key, at_ms=now),
        Exited(key=key, at_ms=now, evidence=Evidence(exit_code=0)),
        Freed(key=key, at_ms=now),
    )
    assert s.state("pair") == "RUNNING"
    assert s.charged("a") == 0
    s.check()
    s.wait(2 * 3_600)
    assert s.state("pair") == "COMPLETED"
    assert s.charged("pair") > 0
    s.check()


@pytest.mark.parametrize("step_ms", [-1, -1_000, -HOUR_MS, -400 * 24 * HOUR_MS])
def test_a_clock_that_steps_back_loses_no_order_and_breaks_no_invariant(step_ms: int) -> None:
    s = Story([node("n1", (R4090, 2)), node("n2", (R4090, 1))], labs={"BCG": 0, "KDG": 9})
    for i in range(4):
        s.submit(f"a{i}", "BCG", 1 + i % 2, run=30 + i)
        s.submit(f"k{i}", "KDG", 1, run=40 + i)
    s.wait(35)
    before = s.order()
    s.clock.set_ms(s.clock.now_ms() + step_ms)
    assert s.order() == before
    s.submit("last", "BCG", run=5)
    assert s.order().index("last") > max(s.order().index(n) for n in before if n.startswith("a"))
    s.node("n2", health=NodeHealth.OFFLINE)
    s.check()
    s.restart()
    assert s.job("last").entered_ms >= s.start_ms
    s.check()
    s.node("n2", health=NodeHealth.STABLE)
    s.wait(400 * 24 * 3_600 + 7_200 if step_ms < -HOUR_MS else 7_200)
    with s.store.read() as tx:
        assert {j.state.value for j in tx.all_jobs()} == {"COMPLETED"}
        assert all(e.gpu_ms >= 0 for e in tx.ledger())
    s.check()


def test_a_restart_on_a_machine_whose_clock_is_behind_turns_no_time_back() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("a", "BCG", run=s.run(100, evidence=Evidence(exit_code=1)))
    s.wait(50)
    then = s.clock.now_ms()
    s.clock.set_ms(s.start_ms - 30 * 24 * HOUR_MS)
    s.restart()
    s.submit("b", "BCG", run=5)
    assert s.job("b").submitted_ms >= s.start_ms
    s.cancel("a")
    assert s.attempt("a").freed_ms is None or s.attempt("a").freed_ms >= then - 50_000
    s.check()
