"""Late results, returns and repeated reports of leases that were given up (policy 2 and 5)."""

from __future__ import annotations

import pytest

from dure.core.model import Evidence, NodeHealth, Phase, Retry, RetryOn
from dure.core.policy import Policy
from dure.ports import Exited, Freed, LeaseExpired, Resumed, Started
from tests.core.build import R4090, node
from tests.story import Story

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


def lost(**request: object) -> Story:
    s = one()
    s.submit("a", "BCG", run=50_000, **request)
    s.wait(700)
    s.node("n1", health=OFF)
    expire(s, "a", OFF)
    assert s.state("a") == "NODE_WAIT"
    return s


def late(s: Story, evidence: Evidence, epoch: int | None = None) -> None:
    key, now = s.key("a", epoch), s.clock.now_ms()
    s.record(Exited(key=key, at_ms=now, evidence=evidence))
    s.record(Freed(key=key, at_ms=now))


@pytest.mark.parametrize(
    ("evidence", "state"),
    [
        (Evidence(exit_code=0), "COMPLETED"),
        (FAIL, "FAILED"),
        (Evidence(exit_code=0, timed_out=True), "TIMED_OUT"),
    ],
)
def test_a_late_result_of_the_current_lease_is_accepted(evidence, state) -> None:
    s = lost()
    late(s, evidence)
    assert s.state("a") == state
    s.check()


def test_a_late_error_of_a_job_that_repeats_errors_changes_nothing() -> None:
    s = lost(retry=ON_ERROR)
    s.node("n1", drained=True, health=STABLE)
    late(s, FAIL)
    assert (s.state("a"), s.job("a").retries) == ("NODE_WAIT", 0)
    s.check()


def test_a_late_result_after_a_counted_loss_in_backoff_is_accepted() -> None:
    s = one()
    s.submit("a", "BCG", run=50_000)
    s.wait(60)
    expire(s, "a", STABLE)
    late(s, Evidence(exit_code=0))
    assert (s.state("a"), s.job("a").retries, s.job("a").eligible_ms) == ("COMPLETED", 1, 0)
    s.check()


def test_a_late_result_of_a_held_job_is_evidence_only() -> None:
    s = lost()
    s.do("hold", "a")
    late(s, Evidence(exit_code=0))
    assert s.state("a") == "PERSONAL_QUEUE_WAIT"
    assert s.attempt("a").evidence.exit_code == 0
    s.check()


def test_a_late_result_of_a_cancelled_job_is_evidence_only() -> None:
    s = lost()
    s.cancel("a")
    late(s, Evidence(exit_code=0))
    assert s.state("a") == "CANCELLED"
    s.check()


def test_a_stale_result_is_discarded_and_its_lease_fenced() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (R4090, 1))])
    s.submit("a", "BCG", run=50_000)
    s.node("n1", health=OFF)
    expire(s, "a", OFF)
    assert s.job("a").epoch == 2
    late(s, Evidence(exit_code=0), epoch=1)
    assert s.state("a") == "RUNNING"
    s.record(Resumed(key=s.key("a", 1), at_ms=s.clock.now_ms()))
    assert s.state("a") == "RUNNING"
    assert "job.event_refused" in s.events("a")
    s.check()


def test_resumed_is_refused_after_the_gpus_were_given_back() -> None:
    s = lost()
    s.record(Freed(key=s.key("a"), at_ms=s.clock.now_ms()))
    s.record(Resumed(key=s.key("a"), at_ms=s.clock.now_ms()))
    assert s.state("a") == "NODE_WAIT"
    s.check()


def test_resumed_is_refused_after_a_counted_loss() -> None:
    s = one()
    s.submit("a", "BCG", run=50_000)
    expire(s, "a", STABLE)
    s.record(Resumed(key=s.key("a"), at_ms=s.clock.now_ms()))
    assert (s.state("a"), s.job("a").retries) == ("GLOBAL_QUEUE_WAIT", 1)
    s.check()


def test_a_node_that_returns_in_maintenance_is_told_to_stop_its_old_job() -> None:
    s = lost()
    s.phase(Phase.DRAINING)
    assert s.engine.world.phase is Phase.ACTIVE
    s.record(Resumed(key=s.key("a"), at_ms=s.clock.now_ms()))
    assert s.state("a") == "NODE_WAIT"
    assert s.backend.leases() == []
    assert s.job("a").retries == 0
    s.check()


def test_a_report_that_comes_twice_is_applied_once() -> None:
    s = one()
    s.submit("a", "BCG", run=50_000)
    s.wait(100)
    key, now = s.key("a"), s.clock.now_ms()
    seen = [
        Started(key=key, at_ms=now),
        Exited(key=key, at_ms=now, evidence=Evidence(exit_code=0)),
        Freed(key=key, at_ms=now),
    ]
    for _ in range(3):
        s.record(*seen, *reversed(seen))
    assert s.ledger("a") == [("run", 1, 100)]
    assert s.job("a").starts == 1
    s.check()


def test_a_report_of_an_unknown_lease_harms_nobody() -> None:
    s = one()
    s.submit("a", "BCG", run=100)
    key = s.key("a").__class__(job=999, epoch=7)
    s.record(Started(key=key, at_ms=0), Freed(key=key, at_ms=0))
    s.check()


def test_node_wait_has_no_limit_and_counts_full_half_hours_over_all_waits() -> None:
    s = Story([node("n1", (R4090, 1), health=OFF)], policy=Policy())
    s.submit("a", "BCG", run=10)
    entered = s.job("a").entered_ms
    for _ in range(2):
        s.wait(30 * 3_600 + 59)
        s.node("n1", health=STABLE, drained=False, ready=False)
        assert s.state("a") == "GLOBAL_QUEUE_WAIT"
        s.node("n1", health=OFF)
        assert s.state("a") == "NODE_WAIT"
    assert s.job("a").node_wait_count == 2 * 60
    assert s.job("a").entered_ms == entered


@pytest.mark.parametrize("act", ["cancel", "hold"])
def test_the_lost_lease_of_a_job_that_is_cancelled_or_held_is_told_to_stop(act: str) -> None:
    s = lost()
    assert len(s.backend.leases()) == 1
    s.do(act, "a")
    s.wait(1)
    assert s.backend.leases() == []
    assert s.attempt("a").freed_ms is not None
    assert s.charged("a") == 0
    s.check()
