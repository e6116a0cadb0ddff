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


def test_r3_a_job_of_the_same_lab_ends_and_rank_one_is_lost() -> None:
    """BCG 24k reserves; another job of BCG adds 8k: 32k > KDG 28k, released after 5 min."""
    s = Story(
        [node("n1", (R4090, 2)), node("n2", (FLAT, 1))],
        tiers=[R4090, FLAT],
        labs={"BCG": 24_000, "KDG": 28_000, "OSL": 1e9},
    )
    s.submit("Y", "BCG", run=8_000, tiers=("FLAT",))
    s.submit("osl-a", "OSL", run=8_000, tiers=("RTX4090",))
    s.submit("osl-b", "OSL", run=300_000, tiers=("RTX4090",))
    s.wait(8_000 - 300)
    s.say("BCG's X stands at rank 1, KDG's K behind it; one GPU frees in a moment")
    s.submit("X", "BCG", 2, tiers=("RTX4090",))
    s.submit("K", "KDG", 2, tiers=("RTX4090",))
    assert s.order() == ["X", "K"]
    s.wait(300)
    s.check()


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
