"""Short builders, so that a test reads like the sentence it checks."""

from __future__ import annotations

from collections.abc import Iterable

from dure.core.fairshare import ZERO_KEY, order_key
from dure.core.model import (
    MICRO_PER_TFLOP_S,
    PROMOTED_WAIT,
    Gpu,
    Job,
    JobRequest,
    JobState,
    JobView,
    Lab,
    Lease,
    Node,
    NodeHealth,
    Phase,
    PlacementId,
    Reservation,
    Shape,
    Tier,
)
from dure.core.placement import Pool, shape_of, usable
from dure.core.plan import LabKey, Snapshot
from dure.core.policy import Policy
from dure.core.queues import QueueIndex

POLICY = Policy()
R4090 = Tier(name="RTX4090", vram_gb=24, mtflops=82_600, sort_order=20, max_gpus=2)
R3080TI = Tier(name="RTX3080Ti", vram_gb=12, mtflops=34_100, sort_order=10, max_gpus=2)
R5090 = Tier(name="RTX5090", vram_gb=32, mtflops=104_800, sort_order=30, max_gpus=8)
BIG4090 = Tier(name="RTX4090", vram_gb=24, mtflops=82_600, sort_order=20, max_gpus=8)


def node(name: str, *gpus: tuple[Tier, int], **kw: object) -> Node:
    rows: list[Gpu] = []
    for tier, count in gpus:
        rows += [Gpu(index=len(rows) + i, tier=tier.name) for i in range(count)]
    kw.setdefault("cores", 16)
    kw.setdefault("memory_mib", 64_000)
    return Node(name=name, backend="simulated", gpus=tuple(rows), **kw)


def pool(tiers: Iterable[Tier], nodes: Iterable[Node]) -> Pool:
    made = Pool()
    for tier in tiers:
        made.put_tier(tier)
    for one in nodes:
        made.put_node(one)
    return made


def place(node_name: str, tier: Tier) -> PlacementId:
    return PlacementId(node=node_name, tier=tier.name)


def lab(name: str, usage_tflop_s: float = 0, **kw: object) -> Lab:
    return Lab(name=name, usage_micro=usage_tflop_s * MICRO_PER_TFLOP_S, **kw)


def view(
    job_id: int,
    lab_name: str,
    num_gpus: int = 1,
    *,
    entered: int = 0,
    state: JobState = JobState.GLOBAL_QUEUE_WAIT,
    reservation: Reservation | None = None,
    eligible: int = 0,
    **shape: object,
) -> JobView:
    return JobView(
        id=job_id,
        lab=lab_name,
        user="u",
        state=state,
        shape=Shape(num_gpus=num_gpus, **shape),
        entered_ms=entered,
        eligible_ms=eligible,
        reservation=reservation,
    )


def request(**kw: object) -> JobRequest:
    kw.setdefault("name", "train")
    kw.setdefault("lab", "BCG")
    kw.setdefault("command", ("true",))
    return JobRequest(**kw)


def job(job_id: int = 1, state: JobState = JobState.RUNNING, **kw: object) -> Job:
    req = kw.pop("request", None) or request(**kw.pop("req", {}))
    kw.setdefault("user", "u")
    kw.setdefault("submitted_ms", 0)
    return Job(id=job_id, request=req, state=state, **kw)


def index(
    labs: Iterable[Lab], views: Iterable[JobView], now_ms: int = 0, policy: Policy = POLICY
) -> QueueIndex:
    made = QueueIndex(policy)
    made.advance(now_ms)
    for one in labs:
        made.put_lab(one)
    for one in views:
        made.put(one)
    return made


def naive_snapshot(
    labs: Iterable[Lab],
    views: Iterable[JobView],
    from_pool: Pool,
    now_ms: int = 0,
    lab_keys: tuple[LabKey, ...] = (),
) -> Snapshot:
    """All waiting jobs, sorted: what the pruned snapshot must be as good as."""
    keys = {one.name: order_key(one, POLICY.half_life_ms) for one in labs}
    limits = {one.name: one.limits.num_gpus for one in labs}
    places = from_pool.views(now_ms)
    waiting = [v for v in views if v.state in PROMOTED_WAIT]
    ranked = sorted(
        (
            v
            for v in waiting
            if v.eligible_ms <= now_ms
            and any(usable(v.shape, p) for p in places)
            and (limits.get(v.lab) is None or v.shape.num_gpus <= limits[v.lab])
        ),
        key=lambda v: (keys.get(v.lab, ZERO_KEY), v.entered_ms, v.id),
    )
    return Snapshot(
        cycle=0,
        now_ms=now_ms,
        phase=Phase.NORMAL,
        placements=places,
        candidates=tuple(ranked),
        head=ranked[0].id if ranked else None,
        holders=tuple(v for v in waiting if v.reservation is not None),
        lab_keys=lab_keys,
    )


__all__ = ["Lease", "NodeHealth", "shape_of"]
