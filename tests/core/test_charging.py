"""Every row of policy 3's charging table: what is charged, when, and never twice."""

from __future__ import annotations

import pytest

from dure.core.model import Evidence, Gpu, NodeHealth, Phase
from dure.engine import admin, commands
from dure.ports import Beat, Exited, Freed, LeaseExpired, Resumed, Returned
from tests.core.build import R3080TI, R4090, node
from tests.story import CUDA_OOM, Story

RATE = 82.6
OFF = NodeHealth.OFFLINE


def pair_story(**run: object) -> Story:
    """A pair that reserved one GPU for 100 s and has now run for 0 s on n1."""
    s = Story([node("n1", (R4090, 2))])
    s.submit("first", "BCG", run=100)
    s.submit("pair", "BCG", 2, run=s.run(run.pop("seconds", 50), **run))
    s.wait(100)
    assert s.attempt("pair").segments[0].gpus == 1
    return s


def expire(s: Story, name: str, state: NodeHealth = OFF, epoch: int | None = None) -> None:
    s.record(LeaseExpired(key=s.key(name, epoch), at_ms=s.clock.now_ms(), node_state=state))


def beat(s: Story, name: str) -> None:
    s.record(Beat(key=s.key(name), at_ms=s.clock.now_ms()))


@pytest.mark.parametrize(
    ("evidence", "state"),
    [
        (Evidence(exit_code=0), "COMPLETED"),
        (Evidence(exit_code=1), "FAILED"),
        (Evidence(exit_code=0, timed_out=True), "TIMED_OUT"),
        (CUDA_OOM, "FAILED"),
        (Evidence(signal=9, oom_kill=1), "FAILED"),
    ],
    ids=["completed", "failed", "timed_out", "gpu_oom", "host_oom"],
)
def test_an_end_charges_run_and_this_attempts_reservation_at_the_end(evidence, state) -> None:
    s = pair_story(evidence=evidence)
    s.wait(49)
    assert s.charged("pair") == 0
    s.wait(1)
    assert s.state("pair") == state
    assert s.ledger("pair") == [("run", 1, 100), ("reserved", 1, 100)]
    assert s.charged("pair") == pytest.approx((100 + 100) * RATE, rel=1e-12)
    s.check()


def test_cancel_while_running_charges_run_and_reservation_when_the_gpus_are_free() -> None:
    s = pair_story(seconds=5_000, save_ms=20_000)
    s.wait(30)
    s.cancel("pair")
    assert s.state("pair") == "CANCELLING"
    assert s.charged("pair") == 0
    s.wait(20)
    assert s.state("pair") == "CANCELLED"
    assert s.ledger("pair") == [("run", 1, 100), ("reserved", 1, 100)]
    s.check()


def test_forced_drain_charges_run_and_reservation_and_puts_the_job_back_in_line() -> None:
    s = pair_story(seconds=5_000, save_ms=7_000)
    s.wait(30)
    admin.drain(s.engine, "root", "n1", drained=True, reason="fan", force=True)
    s.wait(7)
    assert s.state("pair") == "NODE_WAIT"
    assert (s.job("pair").retries, s.job("pair").node_lost_count) == (0, 0)
    assert s.ledger("pair") == [("run", 1, 74), ("reserved", 1, 100)]
    s.check()


def test_the_charge_runs_until_the_gpus_are_seen_free_and_is_booked_then() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("lingers", "BCG", run=s.run(10, linger_ms=5_000))
    s.submit("next", "BCG", run=1)
    s.wait(10)
    assert s.state("lingers") == "COMPLETED"
    assert s.usage("BCG") == 0
    assert s.state("next") == "GLOBAL_QUEUE_WAIT"
    s.wait(5)
    assert s.ledger("lingers") == [("run", 1, 15)]
    assert s.state("next") == "RUNNING"
    s.check()


def test_start_up_is_held_but_written_off() -> None:
    s = Story([node("n1", (R4090, 2))])
    s.submit("slow", "BCG", 2, run=s.run(10, start_ms=30_000))
    s.wait(40)
    assert s.ledger("slow") == [("start_up", 1, 60), ("run", 1, 20)]
    assert s.charged("slow") == 20 * RATE
    s.check()


@pytest.mark.parametrize("state", [NodeHealth.OFFLINE, NodeHealth.STABLE])
def test_a_lost_lease_is_charged_to_the_last_heartbeat_when_it_is_declared(state) -> None:
    s = pair_story(seconds=50_000)
    s.wait(20)
    beat(s, "pair")
    s.wait(90)
    assert s.charged("pair") == 0
    if state is OFF:
        s.node("n1", health=OFF)
    expire(s, "pair", state)
    assert s.ledger("pair") == [("run", 1, 40), ("reserved", 1, 100)]
    s.wait(10)
    s.record(Freed(key=s.key("pair", 1), at_ms=s.clock.now_ms()))
    assert s.charged("pair") == pytest.approx(140 * RATE)
    assert ("lost_tail", 1, 200) in s.ledger("pair")
    s.check()


def test_a_fenced_process_that_still_runs_costs_nothing() -> None:
    s = pair_story(seconds=50_000)
    expire(s, "pair", OFF)
    s.wait(9_000)
    assert s.charged("pair") == 100 * RATE
    s.check()


def test_node_wait_costs_nothing() -> None:
    s = Story([node("n1", (R4090, 1), health=OFF)])
    s.submit("waits", "BCG", run=10)
    s.wait(100_000)
    s.cancel("waits")
    assert s.ledger("waits") == []


def reserving(**kw: object) -> Story:
    """A pair that reserves one of two GPUs since 60 s ago."""
    s = Story([node("n1", (R4090, 2), **kw), node("n2", (R3080TI, 1))])
    s.submit("busy", "BCG", run=50_000, tiers=("RTX4090",))
    s.submit("pair", "BCG", 2, run=100, tiers=("RTX4090",))
    s.wait(60)
    assert s.job("pair").reservation.count == 1
    return s


def gone(s: Story, *, cost: float = 60 * RATE) -> None:
    assert s.job("pair").reservation is None
    assert s.charged("pair") == pytest.approx(cost)
    assert not s.engine.world.index.holders()
    s.wait(10)
    assert s.charged("pair") == pytest.approx(cost)
    s.check()


def test_cancel_while_reserving_charges_the_reservation_at_once() -> None:
    s = reserving()
    s.cancel("pair")
    gone(s)


def test_hold_while_reserving_charges_the_reservation_at_once() -> None:
    s = reserving()
    s.do("hold", "pair")
    gone(s)


def test_drain_of_the_node_releases_and_charges_the_reservation() -> None:
    s = reserving()
    s.node("n1", drained=True)
    assert s.state("pair") == "NODE_WAIT"
    gone(s)


def test_an_offline_node_is_charged_up_to_its_last_good_report() -> None:
    s = reserving()
    s.node("n1", health=OFF, last_seen_ms=s.clock.now_ms() - 15_000)
    gone(s, cost=45 * RATE)


def test_a_last_report_from_before_the_reservation_makes_no_negative_charge() -> None:
    s = reserving()
    s.node("n1", health=OFF, last_seen_ms=s.start_ms - 99_000)
    gone(s, cost=0)


@pytest.mark.parametrize("kind", ["healthy", "foreign"])
def test_a_reserved_gpu_that_is_sick_or_taken_releases_the_reservation(kind) -> None:
    s = reserving()
    flags = {"healthy": kind != "healthy", "foreign": kind == "foreign"}
    s.node("n1", gpus=(Gpu(index=0, tier="RTX4090"), Gpu(index=1, tier="RTX4090", **flags)))
    gone(s)
    assert s.state("pair") == "GLOBAL_QUEUE_WAIT"


def test_maintenance_releases_and_charges_the_reservation() -> None:
    s = reserving()
    s.phase(Phase.DRAINING)
    gone(s)


def test_a_lost_fit_releases_and_charges_the_reservation() -> None:
    s = reserving()
    admin.put_tier(s.engine, "root", R4090.__class__(**{**_fields(R4090), "max_gpus": 1}))
    s.settle()
    gone(s)
    assert s.state("pair") == "NODE_WAIT"
    assert s.reason("pair") == "FIT_LOST"
    assert "job.fit_lost" in s.events("pair")


def _fields(tier: object) -> dict[str, object]:
    return {f: getattr(tier, f) for f in tier.__struct_fields__}


def test_a_suspected_node_keeps_the_reservation_but_frozen() -> None:
    s = reserving()
    s.node("n1", health=NodeHealth.SUSPECTED)
    s.cancel("busy")
    s.wait(10)
    assert s.job("pair").reservation.count == 1
    assert s.state("pair") == "GLOBAL_QUEUE_WAIT"
    assert s.charged("pair") == 0
    s.node("n1", health=NodeHealth.STABLE)
    assert s.state("pair") == "RUNNING"
    s.check()


def test_cancel_while_waiting_costs_nothing() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("busy", "BCG", run=500)
    s.submit("waits", "BCG", run=500)
    s.wait(100)
    s.cancel("waits")
    assert s.ledger("waits") == []


def test_cancel_before_the_process_started_costs_nothing() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("slow", "BCG", run=s.run(10, start_ms=60_000))
    s.wait(10)
    s.cancel("slow")
    assert s.state("slow") == "CANCELLED"
    assert s.charged("slow") == 0
    assert s.ledger("slow") == [("start_up", 1, 10)]
    s.check()


def swapped_then_refused() -> Story:
    """A pair that reserved 100 s on n1, swapped to n2 and was refused there."""
    s = Story([node("n1", (R4090, 2)), node("n2", (R3080TI, 2))])
    s.submit("a", "BCG", run=5_000, tiers=("RTX4090",))
    s.submit("b", "BCG", 2, run=100, tiers=("RTX3080Ti",))
    s.submit("pair", "BCG", 2, run=s.run(10, refuse="no room"))
    s.wait(100)
    assert s.attempt("pair").outcome == "launch_refused"
    return s


def test_segments_left_over_from_a_swap_are_charged_by_a_cancel_while_waiting() -> None:
    s = swapped_then_refused()
    assert s.charged("pair") == 0
    s.wait(20)
    s.cancel("pair")
    assert s.charged("pair") == pytest.approx((100 + 20) * RATE)
    s.check()


def test_segments_left_over_from_a_swap_go_with_the_next_attempt() -> None:
    s = swapped_then_refused()
    s.runs["pair"] = s.run(10)
    s.wait(50)
    s.cancel("a")
    s.wait(10)
    assert s.state("pair") == "COMPLETED"
    assert s.ledger("pair") == [("run", 2, 20), ("reserved", 2, 100), ("reserved", 2, 50)]
    s.check()


def test_resumed_after_a_charged_loss_is_a_further_segment_with_the_gap() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("goes on", "BCG", run=50_000)
    s.wait(100)
    beat(s, "goes on")
    s.node("n1", health=OFF)
    s.wait(100)
    expire(s, "goes on")
    assert s.state("goes on") == "NODE_WAIT"
    assert s.ledger("goes on") == [("run", 1, 100)]
    s.wait(50)
    s.record(Resumed(key=s.key("goes on"), at_ms=s.clock.now_ms()))
    assert s.state("goes on") == "RUNNING"
    s.node("n1", health=NodeHealth.STABLE)
    s.cancel("goes on")
    assert s.ledger("goes on") == [("run", 1, 100), ("run", 1, 150)]
    s.check()


def test_a_lease_lost_resumed_and_lost_again_is_charged_once() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("flaps", "BCG", run=50_000)
    s.node("n1", health=OFF)
    for _ in range(3):
        s.wait(1_000)
        beat(s, "flaps")
        s.wait(100)
        expire(s, "flaps")
        s.record(Resumed(key=s.key("flaps"), at_ms=s.clock.now_ms()))
        assert s.state("flaps") == "RUNNING"
    assert s.ledger("flaps") == [("run", 1, 1_000), ("run", 1, 1_100), ("run", 1, 1_100)]
    s.cancel("flaps")
    assert s.charged("flaps") == pytest.approx(3_300 * RATE)
    s.check()


def test_a_late_result_after_a_charged_loss_is_a_further_segment() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("late", "BCG", run=50_000)
    s.wait(100)
    s.node("n1", health=OFF)
    expire(s, "late")
    s.wait(100)
    key, now = s.key("late"), s.clock.now_ms()
    s.record(Exited(key=key, at_ms=now, evidence=Evidence(exit_code=0)), Freed(key=key, at_ms=now))
    assert s.state("late") == "COMPLETED"
    assert s.charged("late") == 200 * RATE
    s.check()


def lost_while_reserving() -> Story:
    """A pair whose lease on n1 is lost and which now reserves 1 of 2 on n2 since 40 s."""
    s = Story([node("n1", (R4090, 2)), node("n2", (R4090, 2))])
    s.submit("busy", "BCG", run=50_000, node="n2")
    s.submit("pair", "BCG", 2, run=50_000)
    assert s.attempt("pair").placement.node == "n1"
    s.wait(100)
    beat(s, "pair")
    s.node("n1", health=OFF)
    expire(s, "pair")
    assert s.job("pair").reservation.placement.node == "n2"
    s.wait(40)
    return s


def test_a_late_result_charges_what_the_job_has_reserved_meanwhile() -> None:
    s = lost_while_reserving()
    key, now = s.key("pair"), s.clock.now_ms()
    s.record(Exited(key=key, at_ms=now, evidence=Evidence(exit_code=0)), Freed(key=key, at_ms=now))
    assert s.state("pair") == "COMPLETED"
    assert s.ledger("pair") == [("run", 1, 200), ("reserved", 1, 40), ("run", 1, 80)]
    s.check()


def test_resumed_releases_and_charges_what_the_job_has_reserved_meanwhile() -> None:
    s = lost_while_reserving()
    s.record(Resumed(key=s.key("pair"), at_ms=s.clock.now_ms()))
    assert s.state("pair") == "RUNNING"
    assert s.job("pair").reservation is None
    assert ("reserved", 1, 40) in s.ledger("pair")
    s.check()


def test_a_lease_lost_while_cancelling_is_charged_as_a_loss_and_the_job_is_cancelled() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("absent", "BCG", run=s.run(50_000, save_ms=10**9))
    s.wait(100)
    beat(s, "absent")
    s.node("n1", health=OFF)
    with s.engine.change("cancel") as work:  # the stop never reaches the absent node
        commands._cancel_running(work, work.job(s.jobs["absent"]))
    s.wait(100)
    expire(s, "absent")
    assert s.state("absent") == "CANCELLED"
    s.record(Freed(key=s.key("absent"), at_ms=s.clock.now_ms()))
    assert s.charged("absent") == 100 * RATE
    s.check()


def test_a_bye_gives_the_lease_back_uncounted_and_charges_to_the_last_heartbeat() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("evening", "BCG", run=50_000)
    s.wait(300)
    beat(s, "evening")
    s.node("n1", health=OFF)
    s.record(Returned(key=s.key("evening"), at_ms=s.clock.now_ms()))
    assert s.state("evening") == "NODE_WAIT"
    assert s.ledger("evening") == [("run", 1, 300)]
    assert s.job("evening").node_lost_count == 0
    s.check()


def test_the_rate_is_the_tiers_when_the_segment_began() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("dear", "BCG", run=100)
    admin.put_tier(s.engine, "root", R4090.__class__(**{**_fields(R4090), "mtflops": 1_000}))
    s.wait(100)
    s.submit("cheap", "BCG", run=100)
    s.wait(100)
    assert (s.charged("dear"), s.charged("cheap")) == (8_260, 100)


def test_past_charges_stay_with_the_lab_when_a_user_moves_or_leaves() -> None:
    """S15: deleting or moving a user never erases what a lab has used."""
    s = Story([node("n1", (R4090, 1))], labs={"BCG": 0, "KDG": 0})
    s.submit("mine", "BCG", run=100)
    s.wait(50)
    user = s.user("bcg")
    moved = user.__class__(**{**_fields(user), "lab": "KDG", "active": False})
    admin.put_user(s.engine, "root", moved)
    s.wait(50)
    assert (s.usage("BCG"), s.usage("KDG")) == (8_260, 0)
    assert s.lab_usage("BCG") == pytest.approx(8_260)
