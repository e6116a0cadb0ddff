"""The simulator drives the production planner; real traces check its numbers."""

from __future__ import annotations

import json
import os
import statistics
from functools import cache
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from dure.core.policy import Policy
from dure.sim.contenders import CONTENDERS, contender
from dure.sim.generate import as_csv, generate
from dure.sim.metrics import Metrics, jain, max_min, measure
from dure.sim.refusals import SimulationRefused
from dure.sim.replay import Options, Replay
from dure.sim.trace import Trace, TraceJob, read_cluster, read_trace, suited
from dure.wiring.simulate import simulate
from tests.sim.traces import CLUSTER, TRACES, real_traces


def replay(trace: Trace, policy: Policy | None = None, **options: object):
    made = Replay(trace, read_cluster(CLUSTER), policy or Policy(), Options(**options))
    return made, made.run()


def test_the_same_seed_gives_the_same_run() -> None:
    one, two = (replay(generate(300, 5, 3, seed=7))[1] for _ in range(2))
    assert one.ran == two.ran
    assert one.cycles == two.cycles


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_job_runs_once_and_no_gpu_twice(name: str) -> None:
    made, result = replay(
        generate(400, 5, 3, seed=3), contender(name).policy, line=contender(name).line
    )
    assert sorted(r.job.id for r in result.ran) == [j.id for j in made.trace.jobs]
    assert not made.pool.leases
    changes = sorted(
        [(r.start_s, r.job.num_gpus) for r in result.ran]
        + [(r.end_s, -r.job.num_gpus) for r in result.ran]
    )
    held = 0
    for _, change in changes:
        held += change
        assert 0 <= held <= made.result.gpus


def test_what_is_charged_is_what_was_occupied_and_reserved() -> None:
    flat = [msgspec.structs.replace(t, mtflops=1000) for t in read_cluster(CLUSTER).tiers]
    cluster = msgspec.structs.replace(read_cluster(CLUSTER), tiers=tuple(flat))
    # A half-life so long that nothing decays: the labs' use is the sum of all charges.
    policy = Policy(half_life_s=1e15)
    made = Replay(generate(300, 4, 2, seed=5), cluster, policy)
    result = made.run()
    occupied = sum(r.job.num_gpus * (r.end_s - r.start_s) for r in result.ran)
    charged = sum(lab.usage_micro for lab in made.labs.values()) / 1e6
    assert charged == pytest.approx(occupied + result.reserved_gpu_s, rel=1e-6)


def test_submit_times_between_milliseconds_do_not_stop_time() -> None:
    """A submit at 5000.4 ms was due at 5000 and never came: the run went on for ever."""
    jobs = tuple(
        TraceJob(id=i, name=f"j{i}", lab="a", user="u", submit_s=5.0004, run_s=1.0, num_gpus=1)
        for i in range(1, 4)
    )
    assert len(replay(Trace(jobs, 0))[1].ran) == 3


def test_the_example_is_what_the_generator_makes() -> None:
    example = CLUSTER.with_name("example.csv")
    made = generate(400, 6, 3.0, seed=1)
    if os.environ.get("DURE_GOLDEN") == "write":
        example.write_text(as_csv(made), encoding="utf-8")
    assert example.read_text(encoding="utf-8") == as_csv(made)
    read = read_trace(example)
    assert [(j.lab, j.submit_s, j.run_s, j.num_gpus) for j in read.jobs] == [
        (j.lab, j.submit_s, j.run_s, j.num_gpus) for j in made.jobs
    ]
    _, result = replay(suited(read, read_cluster(CLUSTER)))
    found = measure(result)
    # It is there to be looked at: somebody must wait, large jobs most of all.
    assert found.all.mean_h > 1
    assert found.by_gpus[8].mean_h > found.by_gpus[1].mean_h


def test_slots_hold_a_users_jobs_back() -> None:
    jobs = tuple(
        TraceJob(id=i, name=f"j{i}", lab="a", user="u", submit_s=0, run_s=100, num_gpus=1)
        for i in range(1, 5)
    )
    _, free = replay(Trace(jobs, 0))
    _, limited = replay(Trace(jobs, 0), slots=1)
    assert {r.start_s for r in free.ran} == {0.0}
    assert sorted(r.start_s for r in limited.ran) == [0.0, 100.0, 200.0, 300.0]


def test_utilisation_is_of_the_time_with_a_queue_or_of_all_of_it() -> None:
    """24 GPUs: 12 busy for the whole 100 s, with nobody waiting, are a half."""
    jobs = tuple(
        TraceJob(id=i, name="j", lab="a", user="u", submit_s=0, run_s=100, num_gpus=1)
        for i in range(1, 13)
    )
    assert measure(replay(Trace(jobs, 0))[1]).utilisation == pytest.approx(0.5)
    more = tuple(msgspec.structs.replace(jobs[0], id=i) for i in range(13, 31))
    # 24 of 30 run until 100 s, when the last one starts.
    assert measure(replay(Trace((*jobs, *more), 0))[1]).utilisation == pytest.approx(1.0)


def test_slots_lend_while_gpus_would_stay_idle() -> None:
    jobs = tuple(
        TraceJob(id=i, name=f"j{i}", lab="a", user="u", submit_s=0, run_s=100, num_gpus=1)
        for i in range(1, 5)
    )
    _, lent = replay(Trace(jobs, 0), Policy(slots_borrow=True), slots=1)
    assert {r.start_s for r in lent.ran} == {0.0}


def test_max_min_gives_nobody_more_than_asked() -> None:
    assert max_min({"a": 2, "b": 9, "c": 9}, 10) == {"a": 2, "b": 4, "c": 4}
    assert max_min({"a": 0, "b": 3}, 10) == {"a": 0, "b": 3}
    assert jain([1, 1, 1]) == 1
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("job_id,lab,user,submit_s,duration_s,num_gpus,gpu_model\na,l,u,0,x,1,\n", "line 2"),
        ("job_id,lab,user,submit_s,duration_s,num_gpus,gpu_model\na,l,u,0,1,0,\n", "line 2"),
        ("job_id,lab\na,l\n", "line 2"),
        ("job_id,lab,user,submit_s,duration_s,num_gpus\na,l,u,0,1,1\nb,l\n", "line 3"),
        ("job_id,lab,user,submit_s,duration_s,num_gpus\na,l,u,nan,1,1\n", "line 2"),
        ("", "no job"),
    ],
)
def test_a_bad_trace_names_its_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(SimulationRefused) as error:
        read_trace(path)
    assert line in str(error.value)


def test_jobs_over_eight_gpus_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "job_id,lab,user,submit_s,duration_s,num_gpus,gpu_model\na,l,u,0,1,16,\nb,l,u,0,1,8,\n"
    )
    found = read_trace(path)
    assert (len(found.jobs), found.rejected) == (1, 1)


def test_first_come_first_served_lets_others_pass_only_if_it_is_not_strict() -> None:
    """Two nodes have 8 GPUs, so that the third large job waits, and c finds a small node."""
    rows = [("a", 0, 100, 8), ("a", 0, 200, 8), ("b", 10, 50, 8), ("c", 20, 10, 1)]
    jobs = tuple(
        TraceJob(id=i, name=lab, lab=lab, user=lab, submit_s=at, run_s=run, num_gpus=gpus)
        for i, (lab, at, run, gpus) in enumerate(rows, 1)
    )
    for name, start_s in (("fifo", 20), ("fifo-strict", 100)):
        _, result = replay(Trace(jobs, 0), line=contender(name).line)
        assert {r.job.name: r.start_s for r in result.ran if r.job.id > 2} == {
            "b": 100,
            "c": start_s,
        }


def test_first_come_first_served_knows_no_labs() -> None:
    """Lab a floods the pool: under the planner b goes first as soon as something frees."""
    rows = [("a", k, 1000) for k in range(40)] + [("b", 100, 10)]
    jobs = tuple(
        TraceJob(id=i, name=lab, lab=lab, user=lab, submit_s=at, run_s=run, num_gpus=1)
        for i, (lab, at, run) in enumerate(rows, 1)
    )
    starts = {}
    for name in ("classic", "fifo"):
        _, result = replay(Trace(jobs, 0), line=contender(name).line)
        starts[name] = next(r.start_s for r in result.ran if r.job.lab == "b")
    assert starts["classic"] == 1000
    # Of 24 GPUs the first that end go to the 16 others of lab a; b takes what ends at 1016.
    assert starts["fifo"] == 1020


def test_jobs_that_fit_nowhere_are_left_out_and_counted() -> None:
    cluster = read_cluster(CLUSTER)
    jobs = tuple(
        TraceJob(id=i, name="j", lab="a", user="u", submit_s=0, run_s=1, num_gpus=g, tiers=t)
        for i, (g, t) in enumerate([(1, ()), (4, ("small",)), (1, ("no-such",))], 1)
    )
    found = suited(Trace(jobs, 0), cluster)
    assert [j.id for j in found.jobs] == [1]
    assert found.unfit == 2
    with pytest.raises(SimulationRefused) as error:
        suited(Trace(jobs[1:], 0), cluster)
    assert error.value.code == "NOTHING_FITS"
    assert "8" in error.value.text("ko")


# -- real clusters -------------------------------------------------------------------


@cache
def measured(name: str, under: str) -> Metrics:
    trace = read_trace(TRACES / f"{name}.csv.gz")
    cluster = read_cluster(TRACES / f"cluster-{name}.json")
    chosen = contender(under)
    return measure(Replay(trace, cluster, chosen.policy, Options(line=chosen.line)).run())


@real_traces
def test_classic_on_philly_medium_is_what_an_independent_simulator_found() -> None:
    found = measured("philly-medium", "classic")
    assert found.all.mean_h == pytest.approx(20.2, abs=3)
    assert found.jain == pytest.approx(0.92, abs=0.02)
    assert 0.45 <= found.reservations_broken_share <= 0.60
    assert found.by_gpus[8].mean_h == pytest.approx(99, abs=12)
    assert found.queue_empty_d == pytest.approx(12.2, abs=0.6)


@real_traces
def test_strict_first_come_first_served_is_what_an_independent_simulator_found() -> None:
    found = measured("philly-medium", "fifo-strict")
    assert found.all.mean_h == pytest.approx(123, abs=4)
    assert found.jain == pytest.approx(0.567, abs=0.03)


@real_traces
def test_first_come_first_served_with_passing_is_what_an_independent_simulator_found() -> None:
    found = measured("philly-medium", "fifo")
    assert found.all.mean_h == pytest.approx(25.4, abs=2)
    assert found.jain == pytest.approx(0.753, abs=0.03)


@real_traces
def test_counting_what_runs_ends_the_starvation_of_a_lab() -> None:
    """54.6 ± 16 h under the classic order, 4.5 ± 0.9 h when running use counts."""
    classic = measured("philly-medium", "classic")
    accrued = measured("philly-medium", "accrued")
    assert classic.starvation_h > 38
    assert accrued.starvation_h < 6
    assert accrued.jain_6h > classic.jain_6h + 0.1


@real_traces
def test_small_tier_first_keeps_large_nodes_for_large_jobs() -> None:
    classic = measured("philly-medium", "classic")
    small = measured("philly-medium", "lookahead-small")
    assert small.by_gpus[8].mean_h == pytest.approx(67, abs=8)
    assert small.queue_empty_d < classic.queue_empty_d - 1.5


@real_traces
def test_small_trace_is_inside_the_references_noise() -> None:
    found = measured("philly-small", "classic")
    assert found.all.mean_h == pytest.approx(20.3, abs=4)
    assert statistics.fmean([found.jain]) == pytest.approx(0.849, abs=0.08)


@real_traces
def test_balanced_beats_classic_where_it_says_so() -> None:
    """Means of four runs with moved submits: list scheduling is chaotic, one run says little."""
    arguments = [
        *("--trace", str(TRACES / "philly-medium.csv.gz"), "--jitter", "4", "--json"),
        *("--cluster", str(TRACES / "cluster-philly-medium.json")),
        *("--policy", "classic", "--policy", "balanced"),
    ]
    told = CliRunner().invoke(simulate, arguments)
    rows = json.loads(told.stdout)["policies"]
    classic, balanced = rows["classic"], rows["balanced"]
    assert balanced["wait_8gpu_h"] < 0.75 * classic["wait_8gpu_h"]
    assert balanced["p95_wait_8gpu_h"] < 0.85 * classic["p95_wait_8gpu_h"]
    assert balanced["starvation_h"] < 0.25 * classic["starvation_h"]
    assert measured("philly-medium", "balanced").starvation_h <= 4
    assert balanced["jain_6h"] >= 0.87 > classic["jain_6h"]
    assert balanced["queue_empty_d"] < classic["queue_empty_d"] - 1.5
    assert balanced["utilisation"] > classic["utilisation"] + 0.05
    assert balanced["mean_wait_h"] < 1.05 * classic["mean_wait_h"]
