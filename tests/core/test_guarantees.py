"""What policy 4 guarantees, sentence by sentence, on the planner itself."""

from __future__ import annotations

import msgspec
import pytest

from dure.core.invariants import check_plan
from dure.core.model import Lease, NodeHealth, Phase, Reservation, Skip
from dure.core.plan import Absorb, Dispatch, Plan, ReasonCode, Release, ReleaseCause, Reserve
from dure.core.scheduler import plan
from tests.core import build as b

N1 = b.place("n1", b.R4090)
N2 = b.place("n2", b.R3080TI)


def lease(pool, node: str, tier, *gpus: int, job: int = 900) -> None:
    key = len(pool.leases) + 1
    pool.take(Lease(job=job + key, epoch=1, placement=b.place(node, tier), gpus=gpus))


def held(place, count: int, since: int = 0) -> Reservation:
    return Reservation(placement=place, count=count, since_ms=since, mtflops=82_600)


def decide(labs, views, pool, **changes) -> Plan:
    snapshot = b.index(labs, views).snapshot(pool, cycle=1)
    snapshot = msgspec.structs.replace(snapshot, **changes)
    made = plan(snapshot, b.POLICY)
    assert check_plan(snapshot, made) == []
    return made


def dispatched(made: Plan) -> dict[int, tuple[str, tuple[int, ...]]]:
    return {d.job: (d.placement.node, d.gpus) for d in made.decisions if isinstance(d, Dispatch)}


LABS = [b.lab("A", 1), b.lab("B", 2), b.lab("C", 3)]


def two_nodes(best: int = 2, worse: int = 2):
    return b.pool(
        [b.R4090, b.R3080TI], [b.node("n1", (b.R4090, best)), b.node("n2", (b.R3080TI, worse))]
    )


# -- the head never yields ------------------------------------------------------------


def test_the_head_never_yields_a_gpu_it_waits_for() -> None:
    pool = two_nodes(worse=0)
    lease(pool, "n1", b.R4090, 0)
    made = decide(LABS, [b.view(1, "A", 2), b.view(2, "B"), b.view(3, "C")], pool)
    assert made.decisions == (Reserve(job=1, placement=N1, count=1),)
    assert made.reasons[1].code is ReasonCode.RESERVING


def test_the_head_takes_what_is_reserved_by_it_and_nobody_else_does() -> None:
    pool = two_nodes(worse=0)
    head = b.view(1, "A", 2, reservation=held(N1, 2))
    made = decide(LABS, [head, b.view(2, "B")], pool)
    assert dispatched(made) == {1: ("n1", (0, 1))}


def test_a_later_job_may_use_what_the_head_neither_uses_nor_reserves() -> None:
    pool = two_nodes()
    lease(pool, "n1", b.R4090, 0)
    views = [b.view(1, "A", 2, tiers=("RTX4090",)), b.view(2, "B"), b.view(3, "C")]
    made = decide(LABS, views, pool)
    assert Reserve(job=1, placement=N1, count=1) in made.decisions
    assert dispatched(made) == {2: ("n2", (0,)), 3: ("n2", (1,))}


def test_rank_two_never_reserves() -> None:
    pool = two_nodes(worse=0)
    lease(pool, "n1", b.R4090, 0)
    made = decide(LABS, [b.view(1, "A", node="n9"), b.view(2, "B", 2), b.view(3, "C", 2)], pool)
    assert [d.job for d in made.decisions if isinstance(d, Reserve)] == [2]


def test_a_job_of_one_gpu_never_reserves() -> None:
    pool = two_nodes()
    lease(pool, "n1", b.R4090, 0, 1)
    lease(pool, "n2", b.R3080TI, 0, 1)
    assert decide(LABS, [b.view(1, "A")], pool).decisions == ()


# -- a lab that takes much passes its turn -------------------------------------------


def test_a_lab_that_takes_much_passes_its_turn() -> None:
    pool = two_nodes(best=1, worse=0)
    early, late = b.view(1, "C", entered=1), b.view(2, "A", entered=99)
    assert set(dispatched(decide(LABS, [early, late], pool))) == {2}


def test_r3_whoever_is_not_rank_one_any_more_is_released_before_any_dispatch() -> None:
    pool = two_nodes(worse=0)
    lease(pool, "n1", b.R4090, 0)
    views = [b.view(1, "B", 2, reservation=held(N1, 1)), b.view(2, "A")]
    made = decide(LABS, views, pool)
    assert made.decisions[0] == Release(job=1, placement=N1, gpus=1, cause=ReleaseCause.LOST_RANK)
    assert dispatched(made) == {2: ("n1", (1,))}


@pytest.mark.parametrize("why", ["later", "absent", "skipped"])
def test_r3_a_holder_that_is_not_ranked_is_released(why: str) -> None:
    pool = two_nodes(worse=0)
    lease(pool, "n1", b.R4090, 0)
    kw = {
        "later": {"eligible": 50},
        "absent": {"node": "n9"},
        "skipped": {"skips": (Skip(placement=N1, until_ms=99),)},
    }[why]
    made = decide(LABS, [b.view(1, "A", 2, reservation=held(N1, 1), **kw)], pool)
    assert [type(d) for d in made.decisions] == [Release]


# -- reserved GPUs keep serving ------------------------------------------------------


def test_reserved_gpus_keep_serving_replicas_until_they_are_used() -> None:
    """A reservation evicts nothing; a replica is evicted by a dispatch only."""
    pool = two_nodes(worse=0)
    pool.replicas[N1] = frozenset({0, 1})
    lease(pool, "n1", b.R4090, 0)
    pool.put_node(pool.nodes["n1"])
    made = decide(LABS, [b.view(1, "A", 2)], pool)
    assert made.decisions == (Reserve(job=1, placement=N1, count=1),)
    pool.release(901, 1)
    made = decide(LABS, [b.view(1, "A", 2, reservation=held(N1, 1))], pool)
    assert made.decisions[-1] == Dispatch(job=1, placement=N1, gpus=(0, 1), evict=(0, 1))


def test_research_takes_truly_empty_gpus_before_those_with_a_replica() -> None:
    pool = two_nodes(best=4, worse=0)
    pool.replicas[N1] = frozenset({0, 2})
    pool.put_node(pool.nodes["n1"])
    made = decide(LABS, [b.view(1, "A", 2)], pool)
    assert made.decisions == (Dispatch(job=1, placement=N1, gpus=(1, 3), evict=()),)


def test_of_two_equal_nodes_the_one_with_fewer_evictions_is_taken() -> None:
    nodes = [b.node(n, (b.R4090, 1)) for n in ("n1", "n2")]
    pool = b.pool([b.R4090], nodes)
    pool.replicas[N1] = frozenset({0})
    assert dispatched(decide(LABS, [b.view(1, "A")], pool)) == {1: ("n2", (0,))}


# -- no later job takes what would start an earlier one whole ------------------------


def test_no_later_job_takes_what_would_start_an_earlier_one_whole() -> None:
    pool = two_nodes()
    views = [
        b.view(1, "A", 2, entered=1, tiers=("RTX4090",)),
        b.view(2, "A", 2, entered=2),
        b.view(3, "A", 1, entered=3),
    ]
    made = decide(LABS, views, pool)
    assert dispatched(made) == {1: ("n1", (0, 1)), 2: ("n2", (0, 1))}


def test_s19_jobs_behind_a_blocked_head_do_not_take_what_it_waits_for() -> None:
    pool = two_nodes(worse=0)
    lease(pool, "n1", b.R4090, 0)
    small = [b.view(i, "B", entered=i) for i in range(2, 50)]
    made = decide(LABS, [b.view(1, "A", 2), *small], pool)
    assert dispatched(made) == {}


# -- mixed nodes need no care --------------------------------------------------------


def test_mixed_nodes_need_no_care() -> None:
    """Each job runs inside one placement, whatever else its node has."""
    tiers = [b.BIG4090, b.R5090]
    pool = b.pool(tiers, [b.node("m", (b.BIG4090, 2), (b.R5090, 2))])
    views = [b.view(i, "A", 2, entered=i) for i in range(1, 4)]
    made = decide(LABS, views, pool)
    assert dispatched(made) == {1: ("m", (2, 3)), 2: ("m", (0, 1))}


def test_a_job_never_gets_gpus_of_two_nodes() -> None:
    pool = b.pool([b.R4090], [b.node("n1", (b.R4090, 1)), b.node("n2", (b.R4090, 1))])
    pool.put_node(b.node("n3", (b.R4090, 2)))
    lease(pool, "n3", b.R4090, 0, 1)
    made = decide(LABS, [b.view(1, "A", 2)], pool)
    # n1 and n2 could never hold it whole: not even a reservation there.
    assert made.decisions == ()
    pool.release(901, 1)
    assert dispatched(decide(LABS, [b.view(1, "A", 2)], pool)) == {1: ("n3", (0, 1))}


# -- where to dispatch and to reserve ------------------------------------------------


def test_dispatch_prefers_the_better_tier_then_the_tightest_node_then_its_name() -> None:
    nodes = [
        b.node("n1", (b.R4090, 4)),
        b.node("n2", (b.R4090, 2)),
        b.node("n3", (b.R4090, 2)),
        b.node("n0", (b.R3080TI, 1)),
    ]
    pool = b.pool([b.R4090, b.R3080TI], nodes)
    views = [b.view(1, "A", 2, entered=1), b.view(2, "A", 1, entered=2)]
    assert dispatched(decide(LABS, views, pool)) == {1: ("n2", (0, 1)), 2: ("n3", (0,))}


def test_a_holder_prefers_its_own_placement_among_equal_tiers() -> None:
    pool = b.pool([b.R4090], [b.node("n1", (b.R4090, 2)), b.node("n2", (b.R4090, 3))])
    head = b.view(1, "A", 2, reservation=held(b.place("n2", b.R4090), 1))
    made = decide(LABS, [head], pool)
    assert dispatched(made) == {1: ("n2", (0, 1))}
    assert made.decisions[0].cause is ReleaseCause.USED


def test_a_holder_swaps_to_a_worse_tier_that_is_available_whole() -> None:
    pool = two_nodes()
    lease(pool, "n1", b.R4090, 0)
    made = decide(LABS, [b.view(1, "A", 2, reservation=held(N1, 1))], pool)
    assert made.decisions[0].cause is ReleaseCause.SWAPPED
    assert dispatched(made) == {1: ("n2", (0, 1))}


def test_a_holder_waits_for_its_tier_if_it_allows_no_other() -> None:
    pool = two_nodes()
    lease(pool, "n1", b.R4090, 0)
    head = b.view(1, "A", 2, reservation=held(N1, 1), tiers=("RTX4090",))
    assert decide(LABS, [head], pool).decisions == ()


def test_a_reservation_takes_the_best_tier_then_the_most_idle() -> None:
    nodes = [b.node("n1", (b.BIG4090, 4)), b.node("n2", (b.BIG4090, 4)), b.node("n3", (b.R5090, 4))]
    pool = b.pool([b.BIG4090, b.R5090], nodes)
    lease(pool, "n1", b.BIG4090, 0, 1, 2)
    lease(pool, "n2", b.BIG4090, 0, 1)
    lease(pool, "n3", b.R5090, 0, 1, 2, 3)
    made = decide(LABS, [b.view(1, "A", 4)], pool)
    assert made.decisions == (Reserve(job=1, placement=b.place("n2", b.BIG4090), count=2),)


def test_a_reservation_grows_only_inside_its_placement() -> None:
    nodes = [b.node("n1", (b.BIG4090, 4)), b.node("n2", (b.BIG4090, 4))]
    pool = b.pool([b.BIG4090], nodes)
    lease(pool, "n1", b.BIG4090, 0)
    lease(pool, "n2", b.BIG4090, 0)
    head = b.view(1, "A", 4, reservation=held(b.place("n1", b.BIG4090), 1))
    made = decide(LABS, [head], pool)
    assert made.decisions == (Absorb(job=1, placement=b.place("n1", b.BIG4090), count=3),)


def test_s23_a_fully_busy_pool_still_gives_its_first_free_gpu_to_the_head() -> None:
    pool = two_nodes(worse=0)
    lease(pool, "n1", b.R4090, 0)
    lease(pool, "n1", b.R4090, 1)
    views = [b.view(1, "A", 2), b.view(2, "B")]
    assert decide(LABS, views, pool).decisions == ()
    pool.release(902, 1)
    assert decide(LABS, views, pool).decisions == (Reserve(job=1, placement=N1, count=1),)


def test_s25_a_gpu_that_is_not_seen_free_is_not_planned_with() -> None:
    """A node stuck in completing for an hour: the head starts elsewhere meanwhile."""
    pool = two_nodes()
    lease(pool, "n1", b.R4090, 0, 1)
    assert dispatched(decide(LABS, [b.view(1, "A", 2)], pool)) == {1: ("n2", (0, 1))}


# -- R5 ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"health": NodeHealth.OFFLINE}, {"drained": True}],
)
def test_r5_a_placement_out_of_service_breaks_the_reservation(change) -> None:
    pool = two_nodes()
    pool.put_node(msgspec.structs.replace(pool.nodes["n1"], **change))
    lease(pool, "n2", b.R3080TI, 0, 1)
    made = decide(LABS, [b.view(1, "A", 2, reservation=held(N1, 1))], pool)
    assert made.decisions == (Release(job=1, placement=N1, gpus=1, cause=ReleaseCause.BROKEN),)


def test_r5_maintenance_releases_and_gives_nothing_out() -> None:
    pool = two_nodes()
    views = [b.view(1, "A", 2, reservation=held(N1, 1)), b.view(2, "B")]
    made = decide(LABS, views, pool, phase=Phase.DRAINING)
    assert [type(d) for d in made.decisions] == [Release]


def test_a_broken_reservation_may_be_taken_anew_in_the_same_cycle() -> None:
    pool = b.pool([b.BIG4090], [b.node("n1", (b.BIG4090, 4))])
    lease(pool, "n1", b.BIG4090, 0, 1)
    made = decide(LABS, [b.view(1, "A", 4, reservation=held(b.place("n1", b.BIG4090), 3))], pool)
    assert [type(d) for d in made.decisions] == [Release, Reserve]
    assert made.decisions[1].count == 2


def test_an_empty_pool_and_an_empty_queue_are_no_trouble() -> None:
    assert decide([], [], b.pool([], [])).decisions == ()
    assert decide(LABS, [b.view(1, "A")], b.pool([], [])).decisions == ()


def test_a_skip_that_ran_out_is_not_obeyed_any_more() -> None:
    """A view keeps its skips; the index drops them when their time is over."""
    pool = two_nodes(worse=0)
    index = b.index(LABS, [b.view(1, "A", skips=(Skip(placement=N1, until_ms=60),))], now_ms=10)
    assert plan(index.snapshot(pool, 1), b.POLICY).decisions == ()
    index.advance(59)
    assert plan(index.snapshot(pool, 1), b.POLICY).decisions == ()
    index.advance(60)
    assert dispatched(plan(index.snapshot(pool, 1), b.POLICY)) == {1: ("n1", (0,))}
