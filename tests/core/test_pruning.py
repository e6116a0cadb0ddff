"""Planning on the pruned snapshot equals planning on all jobs with a naive sort."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.core.invariants import check_plan
from dure.core.model import Gpu, JobState, Lab, Lease, Limits, Node, NodeHealth, Reservation, Skip
from dure.core.plan import Dispatch, Release, Reserve
from dure.core.policy import Charging, PlacementOrder, Policy
from dure.core.scheduler import plan
from tests.core import build as b

WIDE = msgspec.structs.replace(b.R3080TI, max_gpus=4)
TIERS = [b.R4090, WIDE, b.R5090]
LABS = ["A", "B", "C", "D"]


@st.composite
def nodes(draw: st.DrawFn) -> list[Node]:
    made = []
    for i in range(draw(st.integers(1, 4))):
        gpus = [
            Gpu(
                index=k, tier=draw(st.sampled_from(TIERS)).name, healthy=draw(st.integers(0, 9)) > 0
            )
            for k in range(draw(st.integers(1, 6)))
        ]
        health = draw(st.sampled_from([NodeHealth.STABLE] * 5 + list(NodeHealth)))
        made.append(
            Node(
                name=f"n{i}",
                backend="simulated",
                gpus=tuple(gpus),
                health=health,
                drained=draw(st.integers(0, 9)) == 0,
                memory_mib=draw(st.sampled_from([32_000, 64_000])),
            )
        )
    return made


@st.composite
def worlds(draw: st.DrawFn):
    made = draw(nodes())
    pool = b.pool(TIERS, made)
    for n in made:
        for g in n.gpus:
            if draw(st.booleans()):
                pool.take(
                    Lease(
                        job=900 + g.index,
                        epoch=int(n.name[1]) + 1,
                        placement=b.PlacementId(node=n.name, tier=g.tier),
                        gpus=(g.index,),
                    )
                )
    labs = [
        b.lab(
            x,
            draw(st.sampled_from([0, 0, 5, 5, 70, 1e18])),
            weight=draw(st.sampled_from([1.0, 2.0])),
            limits=Limits(num_gpus=draw(st.sampled_from([None, None, None, 1]))),
        )
        for x in LABS
    ]
    places = [v.id for v in pool.views()]
    views = []
    for i in range(draw(st.integers(0, 14))):
        skip = draw(st.integers(0, 9)) == 0
        views.append(
            b.view(
                i + 1,
                draw(st.sampled_from(LABS)),
                draw(st.sampled_from([1, 1, 1, 2, 2, 3, 4])),
                entered=draw(st.integers(0, 3)),
                eligible=draw(st.sampled_from([0, 0, 0, 50])),
                state=draw(
                    st.sampled_from([JobState.GLOBAL_QUEUE_WAIT] * 4 + [JobState.NODE_WAIT])
                ),
                tiers=tuple(draw(st.sampled_from([[], [], ["RTX4090"], ["RTX3080Ti", "RTX5090"]]))),
                floor_gb=draw(st.sampled_from([0, 0, 10, 20, 24, 30])),
                skips=(Skip(placement=draw(st.sampled_from(places)), until_ms=90),) if skip else (),
            )
        )
    if views and draw(st.booleans()):
        k = draw(st.integers(0, len(views) - 1))
        where = draw(st.sampled_from(places))
        held = Reservation(placement=where, count=draw(st.integers(1, 2)), since_ms=0, mtflops=1)
        views[k] = msgspec.structs.replace(views[k], reservation=held)
    return labs, views, pool


@settings(max_examples=400, deadline=None)
@given(worlds())
def test_plan_on_pruned_snapshot_equals_plan_on_all_jobs(world) -> None:
    labs, views, pool = world
    pruned = b.index(labs, views, now_ms=10).snapshot(pool, cycle=0)
    naive = b.naive_snapshot(labs, views, pool, now_ms=10)
    assert pruned.head == naive.head
    got, want = plan(pruned, b.POLICY), plan(naive, b.POLICY)
    assert got.decisions == want.decisions
    assert check_plan(naive, want) == []
    assert sum(isinstance(d, Reserve) for d in got.decisions) <= 1


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_index_ranks_like_the_naive_sort(world) -> None:
    labs, views, pool = world
    index = b.index(labs, views, now_ms=10)
    naive = b.naive_snapshot(labs, views, pool, now_ms=10)
    assert [v.id for v in index.ranked(pool)] == [v.id for v in naive.candidates]
    for position, v in enumerate(naive.candidates, 1):
        assert index.rank(v.id, pool) == position


@settings(max_examples=100, deadline=None)
@given(worlds(), st.randoms(use_true_random=False))
def test_index_is_a_fold_whose_order_of_changes_does_not_matter(world, rnd) -> None:
    labs, views, pool = world
    straight = b.index(labs, views, now_ms=10)
    shuffled = b.index([], [], now_ms=10)
    noise = [b.view(v.id, rnd.choice(LABS), 1, entered=rnd.randint(0, 9)) for v in views]
    for v in noise:
        shuffled.put(v)
    mixed = list(views)
    rnd.shuffle(mixed)
    for v in mixed:
        shuffled.put(v)
    for one in labs:
        shuffled.put_lab(Lab(name=one.name))
    for one in reversed(labs):
        shuffled.put_lab(one)
    got = shuffled.snapshot(pool, cycle=0)
    want = straight.snapshot(pool, cycle=0)
    assert got.candidates == want.candidates
    assert shuffled.presence_changes(pool) == straight.presence_changes(pool)


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_nobody_behind_rank_one_is_served_before_it(world) -> None:
    """I4: the head never yields; what it holds or could start on is not given away."""
    labs, views, pool = world
    snapshot = b.naive_snapshot(labs, views, pool, now_ms=10)
    made = plan(snapshot, b.POLICY)
    started = [d.job for d in made.decisions if isinstance(d, Dispatch)]
    order = [v.id for v in snapshot.candidates]
    assert started == sorted(started, key=order.index)
    released = {d.job for d in made.decisions if isinstance(d, Release)}
    for holder in snapshot.holders:
        assert holder.id == snapshot.head or holder.id in released


POLICIES = st.builds(
    Policy,
    charging=st.sampled_from(Charging),
    placement_order=st.sampled_from(PlacementOrder),
    keep_blocks=st.booleans(),
    block_margin=st.sampled_from([0.0, 0.25, 50.0]),
    # Jobs enter at 0 to 3 ms and it is 11 ms: none, some or all are past the bound.
    age_bound_s=st.sampled_from([0.0, 0.009, 0.010, 0.001]),
    age_min_gpus=st.sampled_from([2, 3]),
    aged_reservations=st.integers(0, 2),
    reserve_min_gpus=st.sampled_from([2, 9]),
)


def elders(policy: Policy, ranked: list, now_ms: int) -> tuple:
    """Every ranked job past the age bound, oldest first."""
    if not policy.age_bound_s:
        return ()
    until_ms = now_ms - round(policy.age_bound_s * 1000)
    old = [
        v for v in ranked if v.entered_ms <= until_ms and v.shape.num_gpus >= policy.age_min_gpus
    ]
    return tuple(v.id for v in sorted(old, key=lambda v: (v.entered_ms, v.id)))


@settings(max_examples=600, deadline=None)
@given(worlds(), POLICIES, st.data())
def test_pruning_holds_under_every_policy(world, policy, data) -> None:
    """With labs that run something, move back within the cycle, or yield to larger jobs."""
    labs, views, pool = world
    index = b.index(labs, views, now_ms=10, policy=policy)
    for number, place in enumerate(pool.leases.values()):
        lab = data.draw(st.sampled_from(LABS))
        rate = data.draw(st.sampled_from([1, 1000, 82_600]))
        index.started(place, lab, rate, -number)
    index.advance(11)
    pruned = index.snapshot(pool, cycle=0)
    keys = {k.lab: k.key for k in pruned.lab_keys}
    everyone = b.naive_snapshot(labs, views, pool, now_ms=11, lab_keys=pruned.lab_keys)
    ranked = sorted(everyone.candidates, key=lambda v: (keys[v.lab], v.entered_ms, v.id))
    naive = msgspec.structs.replace(
        everyone,
        candidates=tuple(ranked),
        head=ranked[0].id if ranked else None,
        elders=elders(policy, ranked, 11),
    )
    assert [v.id for v in index.ranked(pool)] == [v.id for v in ranked]
    got, want = plan(pruned, policy), plan(naive, policy)
    assert got.decisions == want.decisions
    assert check_plan(pruned, got) == []
    assert check_plan(naive, want) == []
