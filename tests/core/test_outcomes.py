"""Every row of policy 5's outcome table: whose fault it was, and what comes next."""

from __future__ import annotations

import pytest

from dure.core.model import Evidence, NodeHealth, Retry, RetryOn, Tier
from dure.engine import admin
from dure.ports import Freed, LeaseExpired, Returned, Started
from tests.core.build import R3080TI, R4090, node
from tests.story import CUDA_OOM, Story

OFF, STABLE = NodeHealth.OFFLINE, NodeHealth.STABLE
HOST_OOM = Evidence(signal=9, oom_kill=1)
FAIL = Evidence(exit_code=1)
ON_ERROR = Retry(on=RetryOn.ERROR)


def one(**kw: object) -> Story:
    return Story([node("n1", (R4090, 1))], **kw)


def expire(s: Story, name: str, state: NodeHealth, epoch: int | None = None) -> None:
    s.record(LeaseExpired(key=s.key(name, epoch), at_ms=s.clock.now_ms(), node_state=state))


def back(s: Story, name: str) -> None:
    """n1 returns after a reboot: nothing of the old lease lives there."""
    s.record(Freed(key=s.key(name), at_ms=s.clock.now_ms()))
    s.node("n1", health=STABLE)


def test_exit_0_completes() -> None:
    s = one()
    s.submit("a", "BCG", run=5)
    s.wait(5)
    assert (s.state("a"), s.job("a").exit_code) == ("COMPLETED", 0)


def test_another_exit_fails_at_once_unless_errors_are_to_be_repeated() -> None:
    s = one()
    s.submit("a", "BCG", run=s.run(5, evidence=FAIL))
    s.wait(5)
    job = s.job("a")
    assert (s.state("a"), job.exit_code, job.retries) == ("FAILED", 1, 0)
    assert job.error == "EXIT_NONZERO"


def test_counted_failures_wait_1_5_20_minutes_and_the_fourth_is_dead() -> None:
    s = one()
    s.submit("bug", "BCG", run=s.run(10, evidence=FAIL), retry=ON_ERROR)
    entered = s.job("bug").entered_ms
    for failure, minutes in ((1, 1), (2, 5), (3, 20)):
        s.wait(10)
        job = s.job("bug")
        assert (s.state("bug"), job.retries) == ("GLOBAL_QUEUE_WAIT", failure)
        assert job.eligible_ms - s.clock.now_ms() == minutes * 60_000
        assert s.reason("bug") == "RETRY_BACKOFF"
        assert job.entered_ms == entered
        assert s.order() == []
        s.wait(minutes * 60)
        assert s.state("bug") == "RUNNING"
    s.wait(10)
    assert s.state("bug") == "DEAD"
    assert s.charged("bug") == pytest.approx(4 * 10 * 82.6)
    s.golden("backoff_then_dead")


def test_retry_max_of_the_request_wins_over_the_default() -> None:
    s = one()
    s.submit("bug", "BCG", run=s.run(10, evidence=FAIL), retry=Retry(max=0, on=RetryOn.ERROR))
    s.wait(10)
    assert s.state("bug") == "DEAD"


def test_gpu_oom_raises_the_floor_counts_and_keeps_gpus_and_place() -> None:
    s = Story([node("small", (R3080TI, 2)), node("big", (R4090, 2))])
    s.submit("busy", "BCG", 2, run=500)
    s.submit("grow", "BCG", 2, run=s.run(10, evidence=CUDA_OOM))
    entered = s.job("grow").entered_ms
    s.wait(10)
    job = s.job("grow")
    assert (job.floor_gb, job.retries, job.request.num_gpus) == (24, 1, 2)
    assert (job.eligible_ms, job.entered_ms) == (0, entered)
    assert "OOM_ESCALATED" in s.reasons("grow")
    s.wait(490)
    assert s.attempt("grow").placement.node == "big"
    s.wait(10)
    assert (s.state("grow"), s.job("grow").error) == ("FAILED", "OOM_NO_LARGER_TIER")
    assert s.job("grow").floor_gb == 24


def test_gpu_oom_without_a_larger_allowed_tier_fails_with_a_hint() -> None:
    s = Story([node("small", (R3080TI, 1)), node("big", (R4090, 1))])
    s.submit("own", "BCG", run=s.run(10, evidence=CUDA_OOM), tiers=("RTX3080Ti",))
    s.wait(10)
    job = s.job("own")
    assert (s.state("own"), job.error, job.retries) == ("FAILED", "OOM_NO_LARGER_TIER", 0)
    assert job.error_params == {"tier": "RTX3080Ti", "hint_tier": "RTX4090"}


def test_the_oom_hint_names_only_a_tier_that_would_take_the_job() -> None:
    """Two tiers of 48 GB: the first by name has too few GPUs for it."""
    few = Tier(name="A48", vram_gb=48, mtflops=1, max_gpus=1)
    many = Tier(name="B48", vram_gb=48, mtflops=1, max_gpus=8)
    s = Story(
        [node("n", (R4090, 2)), node("f", (few, 1)), node("m", (many, 2))],
        tiers=[R4090, few, many],
    )
    s.submit("own", "BCG", 2, run=s.run(10, evidence=CUDA_OOM), tiers=("RTX4090",))
    s.wait(10)
    assert s.job("own").error_params["hint_tier"] == "B48"


def test_gpu_oom_waits_for_a_larger_tier_that_is_offline() -> None:
    s = Story([node("small", (R3080TI, 1)), node("big", (R4090, 1), health=OFF)])
    runs = iter([s.run(10, evidence=CUDA_OOM), s.run(5)])
    s.submit("grow", "BCG", run=lambda: next(runs))
    s.wait(10)
    assert s.state("grow") == "NODE_WAIT"
    s.node("big", health=STABLE)
    s.wait(5)
    assert s.state("grow") == "COMPLETED"


def test_gpu_oom_looks_at_vram_not_at_sort_order() -> None:
    fast = Tier(name="FAST", vram_gb=12, mtflops=200_000, sort_order=99)
    s = Story([node("f", (fast, 1)), node("big", (R4090, 1))], tiers=[fast, R4090])
    runs = iter([s.run(10, evidence=CUDA_OOM), s.run(5)])
    s.submit("grow", "BCG", run=lambda: next(runs))
    assert s.attempt("grow").placement.node == "f"
    s.wait(10)
    assert s.attempt("grow").placement.node == "big"


def test_oom_escalate_off_fails_at_once() -> None:
    s = Story([node("small", (R3080TI, 1)), node("big", (R4090, 1))])
    s.submit("busy", "BCG", run=50)
    s.submit("no", "BCG", run=s.run(10, evidence=CUDA_OOM), oom_escalate=False)
    s.wait(10)
    assert (s.state("no"), s.job("no").error) == ("FAILED", "GPU_OOM")


def test_host_oom_goes_to_a_placement_with_more_memory_a_gpu_and_counts() -> None:
    s = Story(
        [node("lean", (R4090, 2), memory_mib=32_000), node("rich", (R3080TI, 2), memory_mib=64_000)]
    )
    runs = iter([s.run(10, evidence=HOST_OOM), s.run(5)])
    s.submit("ram", "BCG", run=lambda: next(runs))
    assert s.attempt("ram").placement.node == "lean"
    s.wait(10)
    assert s.attempt("ram").placement.node == "rich"
    assert (s.job("ram").retries, s.job("ram").floor_gb) == (1, 0)
    s.golden("host_oom")


def test_host_oom_without_a_larger_share_fails_and_never_asks_for_a_larger_gpu() -> None:
    s = Story([node("n1", (R3080TI, 1)), node("big", (R4090, 1), memory_mib=1_000)])
    s.submit("ram", "BCG", run=s.run(10, evidence=HOST_OOM), tiers=("RTX3080Ti", "RTX4090"))
    s.cancel("ram")
    s.submit("busy", "BCG", run=50, tiers=("RTX4090",))
    s.submit("ram2", "BCG", run=s.run(10, evidence=HOST_OOM))
    assert s.attempt("ram2").placement.node == "n1"
    s.wait(10)
    job = s.job("ram2")
    assert (s.state("ram2"), job.error, job.floor_gb) == ("FAILED", "HOST_OOM", 0)


def test_a_lost_node_is_not_counted_and_the_job_goes_elsewhere_at_once() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (R4090, 1))])
    s.submit("a", "BCG", run=50_000)
    s.wait(3_600)
    s.node("n1", health=OFF)
    expire(s, "a", OFF)
    job = s.job("a")
    assert s.state("a") == "RUNNING"
    assert s.attempt("a").placement.node == "n2"
    assert (job.retries, job.node_lost_count, job.epoch) == (0, 0, 2)
    s.golden("node_lost")


def test_the_lost_lease_is_fenced_before_its_successor_starts() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (R4090, 1))])
    s.submit("a", "BCG", run=500)
    s.node("n1", health=OFF)
    expire(s, "a", OFF)
    assert [live.key.epoch for live in s.backend.leases()] == [2]


def test_three_losses_within_ten_minutes_of_the_start_are_poison() -> None:
    s = one()
    s.submit("poison", "BCG", run=50_000)
    for loss in (1, 2, 3):
        s.wait(600)
        s.node("n1", health=OFF)
        expire(s, "poison", OFF)
        assert s.job("poison").node_lost_count == loss
        if loss < 3:
            assert s.state("poison") == "NODE_WAIT"
            back(s, "poison")
            assert s.state("poison") == "RUNNING"
    assert (s.state("poison"), s.job("poison").error) == ("DEAD", "POISON_SUSPECTED")
    assert s.job("poison").retries == 0
    s.check()


def test_a_long_job_on_a_pc_that_goes_off_every_night_never_dies_of_it() -> None:
    """S34: losses do not eat the failure budget, with and without a bye."""
    s = one()
    s.submit("long", "BCG", run=10**7)
    for night in range(12):
        s.wait(601 if night % 2 else 60)
        s.node("n1", health=OFF)
        if night % 2:
            expire(s, "long", OFF)
        else:
            s.record(Returned(key=s.key("long"), at_ms=s.clock.now_ms()))
        assert s.state("long") == "NODE_WAIT"
        s.wait(3_600)
        back(s, "long")
        assert s.state("long") == "RUNNING"
    job = s.job("long")
    assert (job.retries, job.node_lost_count, job.starts) == (0, 0, 13)
    assert job.node_wait_count == 12 * 2
    s.check()


def test_a_lease_that_expired_on_a_stable_node_counts_and_waits() -> None:
    s = one()
    s.submit("a", "BCG", run=50_000)
    s.wait(700)
    expire(s, "a", STABLE)
    assert s.job("a").retries == 1
    assert s.reason("a") == "RETRY_BACKOFF"
    assert s.job("a").eligible_ms == s.clock.now_ms() + 60_000


def test_a_lease_that_expired_on_a_suspected_node_is_decided_later() -> None:
    s = one()
    s.submit("a", "BCG", run=50_000)
    s.node("n1", health=NodeHealth.SUSPECTED)
    expire(s, "a", NodeHealth.SUSPECTED)
    assert s.state("a") == "RUNNING"
    s.node("n1", health=OFF)
    expire(s, "a", OFF)
    assert (s.state("a"), s.job("a").retries) == ("NODE_WAIT", 0)
    s.check()


def test_a_start_that_was_never_acknowledged_is_the_nodes_fault() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (R4090, 1))])
    s.submit("a", "BCG", run=s.run(10, start_ms=10**8))
    s.wait(30)
    expire(s, "a", STABLE)
    job = s.job("a")
    assert (job.retries, job.refusals, job.starts) == (0, 1, 0)
    assert s.attempt("a").placement.node == "n2"
    s.check()


def test_a_refused_launch_is_uncounted_and_that_placement_skipped_for_60_s() -> None:
    s = one()
    runs = iter([s.run(1, refuse="no room"), s.run(5)])
    s.submit("a", "BCG", run=lambda: next(runs))
    job = s.job("a")
    assert (s.state("a"), job.retries, job.refusals) == ("GLOBAL_QUEUE_WAIT", 0, 1)
    assert s.reason("a") == "LAUNCH_RETRY"
    s.wait(59)
    assert s.state("a") == "GLOBAL_QUEUE_WAIT"
    s.wait(1)
    assert s.state("a") == "RUNNING"
    assert (s.job("a").refusals, s.job("a").starts) == (0, 1)
    s.golden("launch_refused")


def test_a_refusal_sends_the_job_to_another_placement_at_once() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (R4090, 1))])
    runs = iter([s.run(1, refuse="no room"), s.run(5)])
    s.submit("a", "BCG", run=lambda: next(runs))
    assert (s.state("a"), s.attempt("a").placement.node) == ("RUNNING", "n2")


def test_five_refusals_in_a_row_fail_the_job() -> None:
    s = one()
    s.submit("a", "BCG", run=s.run(1, refuse="no such image"))
    s.wait(239)
    assert s.job("a").refusals == 4
    s.wait(1)
    job = s.job("a")
    assert (s.state("a"), job.error, job.retries) == ("FAILED", "LAUNCH_FAILED", 0)
    assert job.error_params == {"reason": "no such image"}
    assert s.charged("a") == 0
    s.check()


def test_a_start_between_refusals_ends_the_row() -> None:
    s = one()
    kinds = [*[s.run(1, refuse="x")] * 4, s.run(5, evidence=FAIL), *[s.run(1, refuse="x")] * 4]
    runs = iter([*kinds, s.run(5)])
    s.submit("a", "BCG", run=lambda: next(runs), retry=ON_ERROR)
    s.wait(1_000)
    assert s.state("a") == "COMPLETED"


def test_forced_drain_is_not_counted_and_a_later_start_goes_on() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (R3080TI, 1))])
    s.submit("a", "BCG", run=500)
    admin.drain(s.engine, "root", "n1", drained=True, reason="", force=True)
    s.wait(1)
    job = s.job("a")
    assert (job.retries, job.node_lost_count) == (0, 0)
    assert (s.state("a"), s.attempt("a").placement.node) == ("RUNNING", "n2")
    s.golden("forced_drain")


def test_the_time_limit_is_timed_out_also_with_exit_0_in_the_grace() -> None:
    s = one()
    s.submit("a", "BCG", run=s.run(5, evidence=Evidence(exit_code=0, timed_out=True)))
    s.wait(5)
    job = s.job("a")
    assert (s.state("a"), job.exit_code, job.error) == ("TIMED_OUT", 0, "TIME_LIMIT")


def test_cancelled_with_exit_0_is_cancelled_and_keeps_the_exit_code() -> None:
    s = one()
    s.submit("a", "BCG", run=s.run(500, save_ms=3_000))
    s.cancel("a")
    s.wait(3)
    assert (s.state("a"), s.job("a").exit_code) == ("CANCELLED", 0)


def test_job_attempt_counts_started_attempts_only() -> None:
    s = one()
    runs = iter(
        [
            s.run(1, refuse="x"),
            s.run(5, evidence=FAIL),
            s.run(1, refuse="x"),
            s.run(1, refuse="x"),
            s.run(5),
        ]
    )
    s.submit("a", "BCG", run=lambda: next(runs), retry=ON_ERROR)
    s.wait(1_000)
    assert s.state("a") == "COMPLETED"
    assert s.job("a").epoch == 5
    assert [(o.key.epoch, o.start_no) for o in s.backend.launches] == [(2, 1), (5, 2)]


def test_a_node_that_was_absent_before_the_start_does_not_count_as_an_attempt() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (R4090, 1))])
    runs = iter([s.run(10, start_ms=10**8), s.run(10)])
    s.submit("a", "BCG", run=lambda: next(runs))
    s.node("n1", health=OFF)
    expire(s, "a", OFF)
    assert [(o.key.epoch, o.start_no) for o in s.backend.launches] == [(1, 1), (2, 1)]


def test_a_start_that_is_told_after_the_loss_counts_as_an_attempt() -> None:
    s = one()
    s.submit("a", "BCG", run=s.run(10, start_ms=10**8))
    s.node("n1", health=OFF)
    expire(s, "a", OFF)
    s.record(Started(key=s.key("a"), at_ms=s.clock.now_ms()))
    back(s, "a")
    assert [(o.key.epoch, o.start_no) for o in s.backend.launches] == [(1, 1), (2, 2)]
    s.check()
