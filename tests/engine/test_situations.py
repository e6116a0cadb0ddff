"""Situations that broke other products (shared/reference/situations.md), tried on Dure.

Where the others are: S1 S3 S4 S9 S14 S22 tests/core/test_fairshare.py; S6 S7 S11 S22 S37
test_races.py; S9 S17 S20 test_slots.py; S15 tests/core/test_charging.py; S18 S21 S26
tests/core/test_reasons.py; S19 S23 S25 tests/core/test_guarantees.py; S34 tests/core/
test_outcomes.py; S36 test_refusals.py; S43 tests/core/test_oom.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dure.core.invariants import check_world
from dure.core.model import Evidence, NodeHealth, OomKind
from dure.core.oom import oom_kind
from dure.ports import LeaseExpired
from tests.core.build import BIG4090, R3080TI, R4090, node
from tests.story import CUDA_OOM, Story

ASKED = [
    *range(1, 5),
    6,
    7,
    8,
    9,
    11,
    13,
    14,
    15,
    *range(17, 24),
    25,
    26,
    27,
    28,
    34,
    43,
    44,
    46,
    48,
]


def test_every_situation_that_was_asked_for_has_a_named_test() -> None:
    tests = Path(__file__).parents[1]
    files = [*tests.glob("core/test_*.py"), *tests.glob("engine/test_*.py")]
    text = "\n".join(f.read_text() for f in files if f != Path(__file__))
    own = Path(__file__).read_text().split("def test_", 2)[2]
    named = {
        int(n)
        for n in re.findall(r"\bS(\d+)[:,]|test_s(\d+)_|, S(\d+)\b", text + own)
        for n in n
        if n
    }
    missing = [n for n in ASKED if n not in named]
    assert missing == []


def test_s2_a_job_that_starts_first_and_ends_last_is_charged_once_like_the_one_inside_it() -> None:
    """Charges are booked by attempt, not by a watermark over start or end times."""
    s = Story([node("n1", (R4090, 2))], labs={"A": 0, "B": 0})
    s.submit("long", "A", run=1_000)
    s.wait(300)
    s.submit("short", "B", run=100)
    s.wait(700)
    assert (s.usage("A"), s.usage("B")) == (82_600, 8_260)
    assert s.ledger("long") == [("run", 1, 1_000)]
    s.check()


def test_s8_a_charge_is_never_provisional() -> None:
    """Nothing is charged before it is settled, so nothing can leak when a dispatch fails."""
    s = Story([node("n1", (R4090, 2))])
    s.submit("busy", "BCG", run=100)
    s.submit("pair", "BCG", 2, run=s.run(5, refuse="no room"))
    s.wait(50)
    assert s.usage("BCG") == 0
    s.wait(50)
    assert s.job("pair").refusals == 1
    assert s.usage("BCG") == 8_260
    s.cancel("pair")
    assert s.charged("pair") == 100 * 82.6
    s.check()


def test_s13_gpu_time_is_what_fair_share_counts() -> None:
    """The lab that held more GPUs goes later, however few jobs it ran."""
    s = Story([node("n1", (BIG4090, 4))], tiers=[BIG4090], labs={"MANY": 0, "FEW": 0})
    s.submit("wide", "FEW", 4, run=100)
    for i in range(8):
        s.submit(f"m{i}", "MANY", 1, run=40)
    s.wait(181)
    assert (s.usage("FEW"), s.usage("MANY")) == (400 * 82.6, 320 * 82.6)
    s.submit("busy", "MANY", 4, run=10)
    s.submit("f", "FEW", run=1)
    s.submit("m", "MANY", run=1)
    assert s.order() == ["m", "f"]


def test_s27_a_reservation_for_a_wide_job_never_blocks_what_it_cannot_use() -> None:
    """One placement only, and only its idle GPUs: other nodes serve everybody else."""
    s = Story(
        [node("n1", (BIG4090, 8)), node("n2", (R3080TI, 2))],
        tiers=[BIG4090, R3080TI],
        labs={"BCG": 0, "KDG": 5, "OSL": 9},
    )
    s.submit("days", "OSL", run=4 * 86_400, tiers=("RTX4090",))
    s.submit("wide", "BCG", 8, run=60)
    for i in range(4):
        s.submit(f"k{i}", "KDG", run=600, tiers=("RTX3080Ti",))
    assert s.job("wide").reservation.count == 7
    s.wait(1_200)
    assert {s.state(f"k{i}") for i in range(4)} == {"COMPLETED"}
    s.wait(4 * 86_400)
    assert s.state("wide") == "COMPLETED"
    s.check()


def test_s28_a_job_never_waits_for_an_eviction_that_was_lost() -> None:
    """There is no state that waits for an eviction: every cycle plans anew from what is
    idle now, so a lost hint or report costs one sweep at most."""
    s = Story([node("n1", (R4090, 1))])
    s.submit("a", "BCG", run=100)
    s.submit("b", "BCG", run=10)
    s.engine.on_change(lambda: None)
    s.clock.advance(100)
    s.controller.sweep()
    assert s.state("b") == "RUNNING"


def test_s30_no_job_is_ever_stopped_for_another() -> None:
    """Cannot arise: research is never preempted; only replicas yield (policy 7)."""
    s = Story([node("n1", (R4090, 2))], labs={"BCG": 1e9, "KDG": 0})
    s.submit("heavy", "BCG", 2, run=1_000)
    for i in range(5):
        s.submit(f"k{i}", "KDG", run=10)
    s.wait(999)
    assert s.state("heavy") == "RUNNING"


def test_s44_a_cuda_oom_is_seen_though_it_is_only_exit_1() -> None:
    assert oom_kind(CUDA_OOM) is OomKind.GPU
    s = Story([node("n1", (R3080TI, 1)), node("n2", (R4090, 1), drained=True)])
    s.submit("a", "BCG", run=s.run(5, evidence=CUDA_OOM))
    s.wait(5)
    assert (s.state("a"), s.job("a").floor_gb) == ("NODE_WAIT", 24)


def test_s46_cancel_charges_the_last_interval_once_and_an_instant_cancel_nothing() -> None:
    s = Story([node("n1", (R4090, 2))])
    s.submit("instant", "BCG", run=1_000)
    s.cancel("instant")
    assert s.charged("instant") == 0
    s.submit("a", "BCG", run=s.run(1_000, save_ms=10_000))
    s.wait(100)
    s.cancel("a")
    s.cancel("a")
    s.wait(5)
    s.cancel("a")
    s.wait(5)
    assert s.ledger("a") == [("run", 1, 110)]
    s.check()


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_s48_cost_grows_with_gpus_and_not_with_their_square(gpus: int) -> None:
    s = Story([node("n1", (BIG4090, 8))], tiers=[BIG4090])
    s.submit("gang", "BCG", gpus, run=100)
    s.wait(100)
    assert s.usage("BCG") == gpus * 8_260
    assert s.ledger("gang") == [("run", 1, gpus * 100)]


def test_s38_gpus_of_an_ended_job_whose_children_live_are_not_idle() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("leaks", "BCG", run=s.run(10, linger_ms=3_600_000, evidence=Evidence(exit_code=1)))
    s.submit("next", "BCG", run=1)
    s.wait(3_000)
    assert (s.state("leaks"), s.state("next")) == ("FAILED", "GLOBAL_QUEUE_WAIT")
    s.wait(700)
    assert s.state("next") == "COMPLETED"
    assert s.ledger("leaks") == [("run", 1, 3_610)]


def test_s55_a_short_network_trouble_moves_nothing() -> None:
    """OFFLINE alone takes no work away; the lease decides."""
    s = Story([node("n1", (R4090, 1)), node("n2", (R4090, 1))])
    s.submit("a", "BCG", run=1_000)
    for health in (NodeHealth.SUSPECTED, NodeHealth.OFFLINE, NodeHealth.STABLE):
        s.node("n1", health=health)
        s.wait(30)
        assert (s.state("a"), s.attempt("a").placement.node) == ("RUNNING", "n1")
    s.check()


def test_s41_a_job_given_up_for_lost_never_runs_beside_its_successor() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (R4090, 1))])
    s.submit("a", "BCG", run=1_000)
    s.node("n1", health=NodeHealth.OFFLINE)
    s.record(LeaseExpired(key=s.key("a"), at_ms=s.clock.now_ms(), node_state=NodeHealth.OFFLINE))
    assert [x.key.epoch for x in s.backend.leases()] == [2]
    s.wait(1_000)
    assert s.state("a") == "COMPLETED"
    assert check_world(s.truth()) == []
