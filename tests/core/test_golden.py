"""Each scenario of policy.md as readable text (tests/core/golden), and its numbers."""

from __future__ import annotations

from dure.core.model import NodeHealth, Tier
from tests.core.build import R3080TI, R4090, node
from tests.story import CUDA_OOM, Story

FLAT = Tier(name="FLAT", vram_gb=8, mtflops=1_000, max_gpus=1)


def test_one_gpu_one_hour_costs_297360() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("one", "BCG", run=3600)
    s.wait(3600)
    assert s.usage("BCG") == 297_360
    s.golden("one_gpu_one_hour")


def test_two_gpus_half_hour_after_ten_minutes_of_reservation_cost_346920() -> None:
    s = Story([node("n1", (R4090, 2))])
    s.submit("short", "BCG", run=600)
    s.submit("pair", "BCG", 2, run=1800)
    s.say("the pair holds the free GPU until the other one frees, ten minutes later")
    s.wait(600)
    before = s.usage("BCG")
    s.wait(1800)
    assert before == 600 * 82.6
    assert round(s.usage("BCG") - before, 6) == 346_920
    s.golden("reservation_then_run")


def r3_story(other_run: float) -> Story:
    """BCG's pair X at rank 1 on a full node; a job Y of BCG runs on a tier of its own."""
    s = Story(
        [node("n1", (R4090, 2)), node("n2", (FLAT, 1))],
        tiers=[R4090, FLAT],
        labs={"BCG": 24_000, "KDG": 28_000, "OSL": 1e9},
    )
    s.submit("Y", "BCG", run=other_run, tiers=("FLAT",))
    s.submit("osl-a", "OSL", run=7_700, tiers=("RTX4090",))
    s.submit("osl-b", "OSL", run=300_000, tiers=("RTX4090",))
    s.wait(7_000)
    s.say("the pool is full; BCG's pair X is first in line, KDG's pair K behind it")
    s.submit("X", "BCG", 2, tiers=("RTX4090",))
    s.submit("K", "KDG", 2, tiers=("RTX4090",))
    assert s.order() == ["X", "K"]
    s.say("one GPU frees: it goes to the head's reservation, not to K")
    s.wait(700)
    assert s.job("X").reservation.count == 1
    return s


def test_r3_a_job_of_the_same_lab_ends_and_rank_one_is_lost() -> None:
    """BCG 24k reserves; another job of BCG adds 8k: 32k > KDG 28k, released after 5 min."""
    s = r3_story(other_run=8_000)
    s.say("five minutes later BCG's Y ends and adds 8,000: 32k is more than KDG's 28k")
    s.wait(300)
    assert s.state("Y") == "COMPLETED"
    assert s.charged("Y") == 8_000
    assert s.charged("X") == 24_780
    assert s.usage("BCG") == 32_780
    assert s.order() == ["K", "X"]
    assert s.job("X").reservation is None
    assert s.state("X") == "GLOBAL_QUEUE_WAIT"
    assert "RESERVATION_LOST" in s.reasons("X")
    assert s.job("K").reservation.count == 1
    s.say("ten minutes later K is cancelled: its reservation is charged, X is rank 1 again")
    s.wait(600)
    s.cancel("K")
    assert s.charged("K") == 600 * 82.6
    held = s.job("X").reservation
    assert (held.count, held.since_ms) == (1, s.clock.now_ms())
    s.say("the other GPU frees a minute later: X starts")
    s.wait(60)
    s.cancel("osl-b")
    assert s.state("X") == "RUNNING"
    s.wait(100)
    s.cancel("X")
    assert s.ledger("X") == [("reserved", 0, 300), ("run", 1, 200), ("reserved", 1, 60)]
    s.golden("r3_rank_lost")


def test_without_another_job_a_holder_never_loses_rank_one_by_its_own_reservation() -> None:
    s = r3_story(other_run=500_000)
    s.wait(100_000)
    assert s.order() == ["X", "K"]
    assert s.job("X").reservation.count == 1
    assert s.usage("BCG") == 0
    s.check()


def test_swap_to_another_placement_charges_the_reservation_with_the_attempt() -> None:
    s = Story([node("n1", (R4090, 2)), node("n2", (R3080TI, 2))])
    s.submit("a", "BCG", run=5_000, tiers=("RTX4090",))
    s.submit("b1", "BCG", run=600, tiers=("RTX3080Ti",))
    s.submit("b2", "BCG", run=600, tiers=("RTX3080Ti",))
    s.submit("pair", "BCG", 2, run=100)
    assert s.job("pair").reservation.placement.node == "n1"
    s.say("after ten minutes a whole worse placement is free: the pair starts there")
    s.wait(600)
    assert s.attempt("pair").placement.node == "n2"
    assert s.job("pair").reservation is None
    assert s.charged("pair") == 0
    s.wait(100)
    assert s.charged("pair") == 600 * 82.6 + 2 * 100 * 34.1
    s.golden("swap")


def test_absorb_then_dispatch_charges_every_segment() -> None:
    big = Tier(name="RTX4090", vram_gb=24, mtflops=82_600, sort_order=20, max_gpus=8)
    s = Story([node("n1", (big, 3))], tiers=[big])
    s.submit("a", "BCG", run=100)
    s.submit("b", "BCG", run=300)
    s.submit("three", "BCG", 3, run=1_000)
    s.wait(100)
    assert s.job("three").reservation.count == 2
    s.wait(200)
    s.wait(1_000)
    assert s.ledger("three") == [("run", 1, 3_000), ("reserved", 1, 100), ("reserved", 1, 400)]
    s.golden("absorb")


def test_in_a_full_pool_the_first_gpu_that_frees_goes_to_the_head_and_never_to_a_later_job() -> (
    None
):
    s = Story([node("n1", (R4090, 2)), node("n2", (R4090, 2))], labs={"BCG": 0, "KDG": 5, "OSL": 9})
    for i, run in enumerate((100, 5_000, 5_000, 200)):
        s.submit(f"busy{i}", "OSL", run=run)
    s.submit("head", "BCG", 2, run=50)
    for i in range(3):
        s.submit(f"later{i}", "KDG", 1, run=50)
    assert s.job("head").reservation is None
    s.wait(100)
    assert s.job("head").reservation.count == 1
    s.wait(99)
    assert [s.state(f"later{i}") for i in range(3)] == ["GLOBAL_QUEUE_WAIT"] * 3
    s.say("a GPU of another node frees: it cannot help the head, later jobs use it in turn")
    s.wait(1)
    assert s.state("later0") == "RUNNING"
    assert s.job("head").reservation.placement.node == s.attempt("busy0").placement.node
    s.golden("full_pool")


def test_oom_escalates_to_the_larger_tier() -> None:
    s = Story([node("big", (R4090, 1)), node("small", (R3080TI, 1))])
    s.submit("busy", "BCG", run=600)
    runs = iter([s.run(60, evidence=CUDA_OOM), s.run(60)])
    s.submit("grow", "BCG", run=lambda: next(runs))
    s.wait(1000)
    assert s.state("grow") == "COMPLETED"
    s.golden("oom_escalation")


def test_node_off_then_back() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.node("n1", health=NodeHealth.OFFLINE)
    s.submit("wait", "BCG", run=10)
    assert s.state("wait") == "NODE_WAIT"
    s.node("n1", health=NodeHealth.STABLE)
    s.wait(20)
    assert s.state("wait") == "COMPLETED"
    s.golden("node_wait")
