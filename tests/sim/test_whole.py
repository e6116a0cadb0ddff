"""The whole engine in virtual time does what the planner's replay says.

Compared second by second with a replay that also repeats cycles until nothing moves; then
only the path differs (store, events, account), and the tolerance is nothing. The ordinary
replay has one cycle for each event: a reservation that a cycle makes room for is made a
little later, list scheduling is chaotic, and the mean wait may differ by a tenth.
"""

from __future__ import annotations

import pytest

from dure.core.model import Lab
from dure.core.policy import Policy
from dure.sim.contenders import contender
from dure.sim.generate import generate
from dure.sim.metrics import measure
from dure.sim.replay import Options, Replay
from dure.sim.trace import Trace, TraceJob, read_cluster
from dure.sim.whole import Whole
from tests.sim.traces import CLUSTER

LOAD = generate(300, 5, 3, seed=3)


def starts(result) -> dict[int, float]:
    return {r.job.id: r.start_s for r in result.ran}


@pytest.mark.parametrize(("name", "slots"), [("classic", 0), ("classic", 4), ("balanced", 0)])
def test_engine_and_planner_start_every_job_at_the_same_second(name: str, slots: int) -> None:
    cluster, policy = read_cluster(CLUSTER), contender(name).policy
    planner = Replay(LOAD, cluster, policy, Options(slots=slots, until_quiet=True)).run()
    engine = Whole(LOAD, cluster, policy, Options(slots=slots)).run()
    assert engine.violations == ()
    assert starts(engine) == starts(planner)
    assert max(starts(engine).values()) > 86_400
    assert engine.reservations == planner.reservations
    assert engine.broken == planner.broken
    ordinary = measure(Replay(LOAD, cluster, policy, Options(slots=slots)).run())
    assert measure(engine).all.mean_h == pytest.approx(ordinary.all.mean_h, rel=0.1)


def test_the_same_load_gives_the_same_engine_run() -> None:
    cluster = read_cluster(CLUSTER)
    one, two = (Whole(LOAD, cluster, Policy()).run() for _ in range(2))
    assert one.ran == two.ran


def test_a_history_brings_use_weights_and_limits_of_its_own() -> None:
    """Lab b used much before, so that a goes first; a's user has one slot."""
    labs = (
        Lab(name="a", weight=1.0),
        Lab(name="b", usage_micro=5e12, as_of_ms=-3_600_000),
    )
    rows = [("b", "v", 0.0, 500, 8)] * 2 + [("b", "v", 5.0, 100, 8)] + [("a", "u", 5.0, 100, 8)] * 2
    jobs = tuple(
        TraceJob(id=i, name=f"j{i}", lab=lab, user=user, submit_s=at, run_s=run, num_gpus=gpus)
        for i, (lab, user, at, run, gpus) in enumerate(rows, 1)
    )
    trace = Trace(jobs, 0, labs=labs, slots={"u": 1, "v": 0})
    options = Options(slots_of=trace.slots, until_quiet=True)
    planner = Replay(trace, read_cluster(CLUSTER), Policy(), options).run()
    engine = Whole(trace, read_cluster(CLUSTER), Policy(), options).run()
    assert engine.violations == ()
    assert starts(engine) == starts(planner)
    # At 500 s both large nodes are free: one for a's only slot, the other for b.
    assert starts(engine) == {1: 0, 2: 0, 3: 500, 4: 500, 5: 600}


def test_one_user_of_two_labs_and_jobs_pinned_to_places() -> None:
    jobs = (
        TraceJob(id=1, name="x", lab="a", user="u", submit_s=0, run_s=10, num_gpus=1, node="b0001"),
        TraceJob(id=2, name="y", lab="b", user="u", submit_s=0, run_s=10, num_gpus=1),
        TraceJob(
            id=3, name="z", lab="b", user="u", submit_s=0, run_s=0, num_gpus=1, min_vram_gb=20
        ),
    )
    engine = Whole(Trace(jobs, 0), read_cluster(CLUSTER), Policy()).run()
    assert engine.violations == ()
    tiers = {r.job.id: r.tier for r in engine.ran}
    assert tiers == {1: "small", 2: "large", 3: "large"}
