"""How long jobs run, when a job may start, how often that came true; the planner rehearsed."""

from __future__ import annotations

import msgspec
import pytest

from dure.core.forecast import NEVER_MS, Forecast, calibration, forecast, share_of
from dure.core.model import Lab, Lease
from dure.core.policy import BALANCED, Policy
from dure.core.rehearsal import Rehearsal, Running, Start
from dure.core.runtimes import RunTimes
from tests.core import build as b

PLACE = b.place("n1", b.R4090)
MINUTE = 60_000


# -- run times -----------------------------------------------------------------------


def test_run_times_are_of_the_same_person_and_size_where_there_are_enough() -> None:
    times = RunTimes()
    for run_ms in (100, 200, 300, 400, 500):
        times.note("kim", "BCG", 1, run_ms)
    for run_ms in (7000, 8000, 9000):
        times.note("lee", "KDG", 2, run_ms)
    assert times.quantile_ms("kim", "BCG", 1, share=0.5) == 300
    assert times.quantile_ms("kim", "BCG", 4, share=0.5) == 300
    assert times.quantile_ms("new", "KDG", 1, share=0.0) == 7000
    assert times.quantile_ms("new", "NEW", 1, share=0.99) == 9000


def test_a_run_that_has_outlived_the_others_is_expected_to_run_as_long_again() -> None:
    times = RunTimes()
    for run_ms in (100, 200, 300):
        times.note("kim", "BCG", 1, run_ms)
    assert times.quantile_ms("kim", "BCG", 1, share=0.0, elapsed_ms=150) == 200
    assert times.quantile_ms("kim", "BCG", 1, share=0.5, elapsed_ms=400) == 800
    assert times.quantile_ms("kim", "BCG", 1, share=0.5, elapsed_ms=400, limit_ms=500) == 500
    assert times.quantile_ms("kim", "BCG", 1, share=0.9, limit_ms=250) == 250


def test_with_nothing_known_only_a_time_limit_says_something() -> None:
    assert RunTimes().quantile_ms("kim", "BCG", 1, share=0.5) is None
    assert RunTimes().quantile_ms("kim", "BCG", 1, share=0.5, limit_ms=60) == 60


def test_every_job_meets_every_stratum_once() -> None:
    for job in (1, 2, 77):
        shares = sorted(share_of(job, s, 11) for s in range(11))
        assert shares == pytest.approx([(k + 0.5) / 11 for k in range(11)])
    assert [share_of(1, s, 11) for s in range(11)] != [share_of(2, s, 11) for s in range(11)]


# -- bands ---------------------------------------------------------------------------


def test_a_band_is_open_where_somebody_s_end_is_unknown() -> None:
    starts = [Start(at_ms=t, placement=PLACE, after=9) for t in (10, 20, 30, 40, 50)]
    whole = forecast(1, 0, 0, starts)
    assert (whole.p20_ms, whole.p50_ms, whole.p80_ms, whole.after) == (20, 30, 50, 9)
    partly = forecast(1, 0, 0, [*starts[:3], None, Start(at_ms=NEVER_MS, placement=PLACE)])
    assert (partly.p50_ms, partly.p80_ms) == (30, None)
    assert forecast(1, 0, 0, [None, None]) is None


def test_calibration_counts_what_came_true() -> None:
    made = Forecast(job=1, entered_ms=0, made_ms=0, p20_ms=10, p50_ms=20, p80_ms=30)
    came = [msgspec.structs.replace(made, started_ms=t) for t in (None, 0, 5, 10, 30, 31)]
    score = calibration(came)
    assert (score.scored, score.early, score.inside, score.late) == (4, 1, 2, 1)
    assert score.inside_share == 0.5
    assert calibration([]).inside_share is None


# -- rehearsals ----------------------------------------------------------------------


def rehearsal(nodes, labs=("A", "B"), policy: Policy | None = None, running=(), now_ms: int = 0):
    """Jobs named by number run already: (job, lab, gpus, ends at minute)."""
    pool = b.pool([b.R4090, b.R3080TI], nodes)
    leases = []
    for number, lab, gpus, ends in running:
        lease = Lease(job=number, epoch=1, placement=PLACE, gpus=gpus)
        pool.take(lease)
        leases.append((lease, lab, ends))
    made = Rehearsal(policy or Policy(), pool, [Lab(name=n) for n in labs], now_ms)
    for lease, lab, ends in leases:
        made.running(
            Running(lease=lease, lab=lab, mtflops=82_600, started_ms=0, ends_ms=ends * MINUTE)
        )
    return made, pool


def minutes(made: Rehearsal, job: int) -> float:
    return made.starts[job].at_ms / MINUTE


def test_jobs_start_in_the_order_the_planner_would_start_them() -> None:
    """A is charged when its job ends, so B's second job goes before A's."""
    made, _ = rehearsal([b.node("n1", (b.R4090, 1))], running=[(9, "A", (0,), 10)])
    for job, lab, entered in ((1, "A", 0), (2, "B", 1), (3, "B", 2)):
        made.waiting(b.view(job, lab, entered=entered), 5 * MINUTE)
    made.run([1, 2, 3], max_cycles=50)
    assert [minutes(made, j) for j in (2, 3, 1)] == [10, 15, 20]
    assert made.starts[2].after == 9
    assert made.starts[1].after == 3


def test_a_reservation_grows_and_starts_and_its_loss_is_charged() -> None:
    made, _ = rehearsal(
        [b.node("n1", (b.R4090, 2))], running=[(8, "A", (0,), 10), (9, "B", (1,), 30)]
    )
    made.waiting(b.view(1, "A", 2), 5 * MINUTE)
    made.waiting(b.view(2, "B", 1, entered=1), 5 * MINUTE)
    made.run([1, 2], max_cycles=50)
    # A holds the first GPU until its own charge puts B before it: B's job takes it.
    assert minutes(made, 2) == 10
    assert minutes(made, 1) == 30


def test_the_pool_it_was_made_from_is_not_touched() -> None:
    made, pool = rehearsal([b.node("n1", (b.R4090, 1))])
    made.waiting(b.view(1, "A"), MINUTE)
    made.run([1], max_cycles=5)
    assert minutes(made, 1) == 0
    assert not pool.leases
    assert pool.views()[0].idle == 1


def test_it_ends_when_nothing_more_can_start_or_its_cycles_are_used_up() -> None:
    made, _ = rehearsal([b.node("n1", (b.R4090, 1))], running=[(9, "A", (0,), 10)])
    made.waiting(b.view(1, "A", tiers=("none",)), MINUTE)
    assert made.run([1], max_cycles=50) == {}
    made, _ = rehearsal([b.node("n1", (b.R4090, 1))], running=[(9, "A", (0,), 10)])
    made.waiting(b.view(1, "A"), MINUTE)
    assert made.run([1], max_cycles=1) == {}


def test_a_delay_that_ends_is_waited_for() -> None:
    made, _ = rehearsal([b.node("n1", (b.R4090, 1))])
    made.waiting(b.view(1, "A", eligible=7 * MINUTE), MINUTE)
    made.run([1], max_cycles=50)
    assert minutes(made, 1) == 7


def test_it_follows_the_profile_s_rules() -> None:
    """Under `balanced` the 8-GPU job of the same lab takes the whole node first."""
    big = [b.BIG4090]
    for policy, first in ((Policy(), 1), (BALANCED, 2)):
        pool = b.pool(big, [b.node("n1", (b.BIG4090, 8))])
        made = Rehearsal(policy, pool, [Lab(name="A")], 0)
        made.waiting(b.view(1, "A"), 5 * MINUTE)
        made.waiting(b.view(2, "A", 8, entered=1), 5 * MINUTE)
        made.run([1, 2], max_cycles=20)
        assert made.starts[first].at_ms == 0
        assert made.starts[3 - first].at_ms == 5 * MINUTE
