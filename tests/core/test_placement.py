"""Which placements a job fits, what is idle, and what a refusal says (P-1 to P-5)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.core.model import Gpu, Lease, NodeHealth, Shape, Tier
from dure.core.placement import failed_constraint, fits, no_fit, rounded_floor, share
from tests.core import build as b

MIXED = b.node("m", (b.BIG4090, 4), (b.R5090, 4))


def views(tiers, nodes, now_ms: int = 0):
    return {(v.id.node, v.id.tier): v for v in b.pool(tiers, nodes).views(now_ms)}


def test_four_and_four_of_two_models_in_one_node_are_two_placements_of_four() -> None:
    seen = views([b.BIG4090, b.R5090], [MIXED])
    assert {k: v.capacity for k, v in seen.items()} == {("m", "RTX4090"): 4, ("m", "RTX5090"): 4}


def test_eight_gpus_are_refused_there_with_the_nearest_requests() -> None:
    seen = views([b.BIG4090, b.R5090], [MIXED]).values()
    why = no_fit(Shape(num_gpus=8), seen)
    assert why.failed == "capacity"
    assert why.nearest == b.place("m", b.R5090)
    asked = sorted((r["num_gpus"], r["tier"]) for r in why.requests)
    assert asked == [(4, "RTX4090"), (4, "RTX5090")]
    for request in why.requests:
        shape = Shape(
            num_gpus=request["num_gpus"],
            tiers=(request["tier"],),
            floor_gb=request["min_vram_gb"],
        )
        assert any(failed_constraint(shape, v) is None for v in seen)


def test_four_gpus_are_refused_when_every_tier_gives_at_most_two() -> None:
    seen = views([b.R4090, b.R3080TI], [b.node("a", (b.R4090, 4)), b.node("c", (b.R3080TI, 2))])
    why = no_fit(Shape(num_gpus=4), seen.values())
    assert why.failed in ("max_gpus", "capacity")
    assert {r["num_gpus"] for r in why.requests} == {2}


@pytest.mark.parametrize(
    ("shape", "failed"),
    [
        (Shape(num_gpus=2), None),
        (Shape(num_gpus=3), "max_gpus"),
        (Shape(num_gpus=1, tiers=("RTX3080Ti",)), "tiers"),
        (Shape(num_gpus=1, tiers=("RTX3080Ti", "RTX4090")), None),
        (Shape(num_gpus=1, node="other"), "node"),
        (Shape(num_gpus=1, node="n"), None),
        (Shape(num_gpus=1, floor_gb=24), None),
        (Shape(num_gpus=1, floor_gb=24.5), "min_vram_gb"),
        (Shape(num_gpus=1, host_mib=32_000), "host_memory"),
        (Shape(num_gpus=2, host_mib=32_000), None),
    ],
)
def test_each_constraint_is_named_when_it_fails(shape, failed) -> None:
    view = views([b.R4090], [b.node("n", (b.R4090, 2))])["n", "RTX4090"]
    assert failed_constraint(shape, view) == failed


def test_an_inactive_tier_fits_nothing() -> None:
    off = msgspec.structs.replace(b.R4090, active=False)
    view = views([off], [b.node("n", (off, 2))])["n", "RTX4090"]
    assert failed_constraint(Shape(num_gpus=1), view) == "tier_inactive"
    assert not view.in_service


@pytest.mark.parametrize(
    ("change", "in_service", "idle"),
    [
        ({}, True, 2),
        ({"health": NodeHealth.SUSPECTED}, True, 0),
        ({"health": NodeHealth.OFFLINE}, False, 0),
        ({"drained": True}, False, 0),
        ({"ready": False}, True, 0),
        ({"penalty_until_ms": 500}, True, 0),
    ],
)
def test_a_fault_makes_idle_smaller_and_never_capacity(change, in_service, idle) -> None:
    view = views([b.R4090], [b.node("n", (b.R4090, 2), **change)], now_ms=100)["n", "RTX4090"]
    assert (view.capacity, view.in_service, view.idle) == (2, in_service, idle)


def test_sick_foreign_and_leased_gpus_are_not_idle_and_retired_ones_no_capacity() -> None:
    gpus = (
        Gpu(index=0, tier="RTX4090", healthy=False),
        Gpu(index=1, tier="RTX4090", foreign=True),
        Gpu(index=2, tier="RTX4090", retired=True),
        Gpu(index=3, tier="RTX4090"),
        Gpu(index=4, tier="RTX4090"),
    )
    pool = b.pool([b.R4090], [b.Node(name="n", backend="simulated", gpus=gpus)])
    pool.take(Lease(job=1, epoch=1, placement=b.place("n", b.R4090), gpus=(3,)))
    (view,) = pool.views()
    assert (view.capacity, view.free) == (4, (4,))
    pool.release(1, 1)
    assert pool.views()[0].free == (3, 4)


def test_a_penalty_ends_by_time_alone() -> None:
    pool = b.pool([b.R4090], [b.node("n", (b.R4090, 1), penalty_until_ms=500)])
    assert [v.idle for v in pool.views(499)] == [0]
    assert [v.idle for v in pool.views(500)] == [1]


@pytest.mark.parametrize(
    ("n", "cores", "memory"), [(1, 2, 7_750), (2, 4, 15_500), (4, 8, 31_000), (8, 16, 62_000)]
)
def test_cpu_and_memory_follow_the_gpus(n, cores, memory) -> None:
    node = b.node("m", (b.BIG4090, 4), (b.R5090, 4), reserve_mib=2_000, drained=True)
    assert (share(node, n).cores, share(node, n).memory_mib) == (cores, memory)


def test_a_job_never_gets_less_than_one_core() -> None:
    assert share(b.node("n", (b.BIG4090, 8), cores=4), 1).cores == 1


def test_the_floor_is_rounded_up_to_a_tiers() -> None:
    tiers = [b.R4090, b.R3080TI, Tier(name="X", vram_gb=80, mtflops=1)]
    got = [rounded_floor(gb, tiers) for gb in (0, 1, 12, 12.1, 24, 25, 81)]
    assert got == [0, 12, 12, 24, 24, 80, 81]


def test_no_gpus_at_all_is_said_so() -> None:
    why = no_fit(Shape(num_gpus=1), [])
    assert (why.nearest, why.failed, why.requests) == (None, "no_gpus", ())


@given(
    st.builds(
        Shape,
        num_gpus=st.integers(1, 4),
        tiers=st.sampled_from([(), ("RTX4090",), ("RTX3080Ti", "RTX5090")]),
        node=st.sampled_from([None, "n1", "n2"]),
        floor_gb=st.sampled_from([0, 12, 24, 48]),
        host_mib=st.sampled_from([0, 40_000]),
    ),
    st.booleans(),
)
def test_fits_is_the_absence_of_a_failed_constraint(shape: Shape, active: bool) -> None:
    tier = msgspec.structs.replace(b.R4090, active=active)
    nodes = [b.node("n1", (tier, 2), (b.R5090, 1)), b.node("n2", (b.R3080TI, 4))]
    for view in b.pool([tier, b.R5090, b.R3080TI], nodes).views():
        assert fits(shape, view) == (failed_constraint(shape, view) is None)
