"""Profile `balanced`: larger jobs keep their blocks, and age helps where rank does not."""

from __future__ import annotations

import msgspec
import pytest

from dure.core.errors import DureError
from dure.core.invariants import check_plan, ids
from dure.core.model import NodeHealth, Reservation
from dure.core.plan import Absorb, Dispatch, Plan, Release, ReleaseCause, Reserve
from dure.core.policy import BALANCED, PROFILES, Charging, Policy, Profile, profile_fields
from dure.core.scheduler import plan
from dure.settings import load
from tests.core import build as b

BIG = b.node("big", (b.BIG4090, 8))
SMALL = b.node("small", (b.R3080TI, 2))
BLOCKS = Policy(keep_blocks=True, block_margin=0.25)
HOUR_MS = 3_600_000


def decide(labs, views, nodes, policy, taken=(), now_ms=0):
    pool = b.pool([b.BIG4090, b.R3080TI], nodes)
    for number, (node, tier, gpus) in enumerate(taken):
        lease = b.Lease(job=900 + number, epoch=1, placement=b.place(node, tier), gpus=gpus)
        pool.take(lease)
    snapshot = b.index(labs, views, now_ms=now_ms, policy=policy).snapshot(pool, cycle=0)
    made = plan(snapshot, policy)
    assert check_plan(snapshot, made) == []
    return made


def started(made: Plan) -> list[int]:
    return [d.job for d in made.decisions if isinstance(d, Dispatch)]


# -- blocks --------------------------------------------------------------------------

SMALL_FIRST = [b.lab("A", 100), b.lab("B", 110)]
"""A has used less, so that A's job is next; B's is the larger one."""


def test_a_larger_job_takes_the_whole_node_before_a_small_one_breaks_it_up() -> None:
    views = [b.view(1, "A", 1), b.view(2, "B", 8)]
    assert started(decide(SMALL_FIRST, views, [BIG], Policy())) == [1]
    assert started(decide(SMALL_FIRST, views, [BIG], BLOCKS)) == [2]


def test_the_small_job_starts_elsewhere_and_the_node_stays_whole() -> None:
    views = [b.view(1, "A", 1), b.view(2, "B", 8)]
    policy = msgspec.structs.replace(BALANCED, age_bound_s=0)
    made = decide(SMALL_FIRST, views, [BIG, SMALL], policy)
    assert sorted(started(made)) == [1, 2]


def test_a_lab_that_has_used_much_more_does_not_go_first() -> None:
    """The margin: 0.25 doublings for each GPU of the smaller job."""
    views = [b.view(1, "A", 1), b.view(2, "B", 8)]
    assert started(decide([b.lab("A", 100), b.lab("B", 118)], views, [BIG], BLOCKS)) == [2]
    assert started(decide([b.lab("A", 100), b.lab("B", 120)], views, [BIG], BLOCKS)) == [1]
    wider = [b.view(1, "A", 4), b.view(2, "B", 8)]
    assert started(decide([b.lab("A", 100), b.lab("B", 199)], wider, [BIG], BLOCKS)) == [2]
    assert started(decide([b.lab("A", 100), b.lab("B", 201)], wider, [BIG], BLOCKS)) == [1]


def test_the_own_lab_s_larger_job_goes_first_whatever_the_margin() -> None:
    views = [b.view(1, "A", 1, entered=0), b.view(2, "A", 8, entered=5)]
    strict = msgspec.structs.replace(BLOCKS, block_margin=0)
    assert started(decide([b.lab("A", 100)], views, [BIG], strict)) == [2]


def test_a_node_that_is_broken_up_already_is_filled_in_rank_order() -> None:
    """Nothing is left idle for a larger job: only whole places have this rule."""
    views = [b.view(1, "A", 1), b.view(2, "B", 8)]
    made = decide(SMALL_FIRST, views, [BIG], BLOCKS, taken=[("big", b.BIG4090, (3,))])
    assert started(made) == [1]


def test_a_place_with_room_for_both_is_no_block() -> None:
    views = [b.view(1, "A", 1), b.view(2, "B", 5)]
    assert started(decide(SMALL_FIRST, views, [BIG], BLOCKS)) == [1, 2]


def test_a_holder_keeps_its_turn() -> None:
    held = Reservation(placement=b.place("big", b.BIG4090), count=1, since_ms=0, mtflops=1)
    views = [b.view(1, "A", 2, reservation=held), b.view(2, "B", 8)]
    assert started(decide(SMALL_FIRST, views, [BIG], BLOCKS)) == [1]


# -- age -----------------------------------------------------------------------------

AGED = Policy(age_bound_s=3600, reserve_min_gpus=9)
LATE = [b.lab("A", 100), b.lab("B", 1e9)]
OLD, NEW = b.view(2, "B", 8, entered=0), b.view(1, "A", 8, entered=HOUR_MS)


def test_past_the_bound_a_job_goes_before_all_others() -> None:
    assert started(decide(LATE, [NEW, OLD], [BIG], AGED, now_ms=HOUR_MS - 1)) == [1]
    assert started(decide(LATE, [NEW, OLD], [BIG], AGED, now_ms=HOUR_MS)) == [2]


def test_what_cannot_start_reserves_at_any_rank_and_grows_there() -> None:
    taken = [("big", b.BIG4090, (0, 1, 2))]
    views = [b.view(1, "A", 1, entered=HOUR_MS), OLD]
    made = decide(LATE, views, [BIG], AGED, taken=taken, now_ms=HOUR_MS)
    place = b.place("big", b.BIG4090)
    assert made.decisions == (Reserve(job=2, placement=place, count=5),)
    held = Reservation(placement=place, count=4, since_ms=0, mtflops=1)
    holder = msgspec.structs.replace(OLD, reservation=held)
    grown = decide(LATE, [views[0], holder], [BIG], AGED, taken=taken, now_ms=HOUR_MS)
    assert grown.decisions == (Absorb(job=2, placement=place, count=5),)


def test_no_more_reserve_than_the_setting_allows() -> None:
    taken = [("big", b.BIG4090, (0,)), ("other", b.BIG4090, (0,))]
    nodes = [BIG, b.node("other", (b.BIG4090, 8))]
    views = [b.view(i, "B", 8, entered=i) for i in (2, 3, 4)]
    for allowed in (0, 1, 2):
        policy = msgspec.structs.replace(AGED, aged_reservations=allowed)
        made = decide(LATE, views, nodes, policy, taken=taken, now_ms=2 * HOUR_MS)
        assert sum(isinstance(d, Reserve) for d in made.decisions) == allowed


def test_nobody_reserves_beside_a_sick_gpu_that_it_would_need() -> None:
    """Seven of eight were held for ever: the eighth is sick and counts as capacity."""
    sick = msgspec.structs.replace(
        BIG, gpus=(msgspec.structs.replace(BIG.gpus[0], healthy=False), *BIG.gpus[1:])
    )
    views = [b.view(1, "A", 1, entered=HOUR_MS), OLD]
    assert started(decide(LATE, views, [sick], AGED, now_ms=HOUR_MS)) == [1]
    held = Reservation(placement=b.place("big", b.BIG4090), count=7, since_ms=0, mtflops=1)
    holder = msgspec.structs.replace(OLD, reservation=held)
    made = decide(LATE, [views[0], holder], [sick], AGED, now_ms=HOUR_MS)
    assert [d.cause for d in made.decisions if isinstance(d, Release)] == [ReleaseCause.BROKEN]
    assert started(made) == [1]


def test_reservations_by_age_are_never_more_than_allowed_however_they_began() -> None:
    nodes = [b.node(n, (b.BIG4090, 8)) for n in ("x", "y")]
    taken = [("x", b.BIG4090, (0,)), ("y", b.BIG4090, (0,))]
    holders = [
        b.view(
            i,
            "B",
            8,
            entered=i,
            reservation=Reservation(
                placement=b.place(n, b.BIG4090), count=7, since_ms=0, mtflops=1
            ),
        )
        for i, n in ((2, "x"), (3, "y"))
    ]
    views = [b.view(1, "A", 8, entered=2 * HOUR_MS), *holders]
    for allowed, kept in ((0, 0), (1, 1), (2, 2)):
        policy = msgspec.structs.replace(AGED, aged_reservations=allowed)
        made = decide(LATE, views, nodes, policy, taken=taken, now_ms=2 * HOUR_MS)
        assert sum(isinstance(d, Release) for d in made.decisions) == 2 - kept


def test_small_jobs_are_not_helped_by_age() -> None:
    policy = msgspec.structs.replace(AGED, age_min_gpus=8)
    views = [b.view(1, "A", 1, entered=HOUR_MS), b.view(2, "B", 2, entered=0)]
    taken = [("big", b.BIG4090, tuple(range(7)))]
    assert started(decide(LATE, views, [BIG], policy, taken=taken, now_ms=HOUR_MS)) == [1]


def test_a_reservation_by_age_ends_with_the_setting_and_outlives_a_suspicion() -> None:
    held = Reservation(placement=b.place("big", b.BIG4090), count=2, since_ms=0, mtflops=1)
    holder = msgspec.structs.replace(OLD, reservation=held)
    shaky = msgspec.structs.replace(BIG, health=NodeHealth.SUSPECTED)
    views = [b.view(1, "A", 1, entered=HOUR_MS), holder]
    assert decide(LATE, views, [shaky], AGED, now_ms=HOUR_MS).decisions == ()
    off = decide(LATE, views, [shaky], Policy(), now_ms=HOUR_MS)
    assert [d.cause for d in off.decisions if isinstance(d, Release)] == [ReleaseCause.LOST_RANK]


def test_a_young_job_that_reserves_out_of_rank_is_found() -> None:
    pool = b.pool([b.BIG4090], [BIG])
    index = b.index(LATE, [b.view(1, "A", 1), OLD], policy=AGED)
    snapshot = index.snapshot(pool, cycle=0)
    reserve = Reserve(job=2, placement=b.place("big", b.BIG4090), count=1)
    assert "I4" in ids(check_plan(snapshot, Plan(cycle=0, decisions=(reserve,), reasons={})))


# -- profiles ------------------------------------------------------------------------


def test_a_profile_is_a_setting_and_single_numbers_go_before_it() -> None:
    assert load(env={}).policy == PROFILES[Profile.CLASSIC] == Policy()
    assert load(env={"DURE_POLICY__PROFILE": "balanced"}).policy == BALANCED
    mixed = load(env={"DURE_POLICY__PROFILE": "balanced", "DURE_POLICY__CHARGING": "lazy"}).policy
    assert mixed == msgspec.structs.replace(BALANCED, charging=Charging.LAZY)


def test_an_unknown_profile_names_those_there_are() -> None:
    for refused in (
        lambda: profile_fields("best"),
        lambda: load(env={"DURE_POLICY__PROFILE": "x"}),
    ):
        with pytest.raises(DureError, match=r"classic, balanced"):
            refused()
