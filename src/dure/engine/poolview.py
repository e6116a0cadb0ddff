"""The pool as people see it: every GPU by what it does now.

Rule: reservations are counts, not indices; the lowest idle GPUs stand for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import msgspec

from dure import wire
from dure.core.errors import DureError, ErrorCode
from dure.core.model import (
    ACTIVE,
    Gpu,
    Job,
    JobId,
    JobState,
    JobView,
    Lease,
    Node,
    NodeHealth,
    NodeId,
    Phase,
    PlacementId,
    Tier,
    TierId,
)
from dure.core.placement import PlacementView
from dure.engine import render
from dure.engine.engine import Engine

Choose = Callable[[Node], bool]


class _Moment(msgspec.Struct, frozen=True):
    """Frozen values copied from the world in one go."""

    phase: Phase
    tiers: dict[TierId, Tier]
    nodes: list[Node]
    views: dict[PlacementId, PlacementView]
    leases: list[Lease]
    holders: tuple[JobView, ...]
    jobs: dict[JobId, Job] = {}


def _moment(engine: Engine, choose: Choose = lambda _: True) -> _Moment:
    world = engine.world
    with world.lock:
        nodes = sorted((n for n in world.pool.nodes.values() if choose(n)), key=lambda n: n.name)
        names = {n.name for n in nodes}
        now = _Moment(
            phase=world.phase,
            tiers=dict(world.pool.tiers),
            nodes=nodes,
            views={v.id: v for v in world.pool.views(world.index.now_ms)},
            leases=[x for x in world.pool.leases.values() if x.placement.node in names],
            holders=world.index.holders(),
        )
    with engine.store.read() as tx:
        jobs = tx.jobs({x.job for x in now.leases})
    return msgspec.structs.replace(now, jobs=jobs)


def pool(engine: Engine) -> wire.PoolOut:
    """Show all tiers, best first, and all nodes."""
    now = _moment(engine)
    nodes = [_node_out(now, n) for n in now.nodes]
    return wire.PoolOut(
        as_of_ms=engine.clock.now_ms(),
        tiers=[_tier(now, t, nodes) for t in render.best_first(now.tiers.values())],
        nodes=nodes,
    )


def nodes(engine: Engine) -> wire.NodeList:
    """Show all nodes."""
    now = _moment(engine)
    return wire.NodeList(items=[_node_out(now, n) for n in now.nodes])


def node(engine: Engine, name: NodeId) -> tuple[Node, wire.NodeOut]:
    """Show one node, with the value an edit is compared with."""
    now = _moment(engine, lambda n: n.name == name)
    if not now.nodes:
        raise DureError(ErrorCode.NOT_FOUND, kind="node", id=name)
    return now.nodes[0], _node_out(now, now.nodes[0])


def tiers(engine: Engine) -> wire.TierList:
    """Show all tiers, best first."""
    with engine.store.read() as tx:
        found = tx.tiers()
    return wire.TierList(items=[render.tier_out(t) for t in render.best_first(found)])


def tier(engine: Engine, name: TierId) -> Tier:
    """Find one tier, as it is stored."""
    with engine.store.read() as tx:
        found = next((t for t in tx.tiers() if t.name == name), None)
    if found is None:
        raise DureError(ErrorCode.NOT_FOUND, kind="tier", id=name)
    return found


# -- one node ------------------------------------------------------------------------


def _node_out(now: _Moment, node: Node) -> wire.NodeOut:
    taken = {i: x for x in now.leases if x.placement.node == node.name for i in x.gpus}
    held = _held(now, node)
    shown = [g for g in node.gpus if not g.retired]
    return wire.NodeOut(
        name=node.name,
        backend=node.backend,
        health=node.health,
        drained=node.drained,
        drain_reason=node.drain_reason,
        simulated=any(g.simulated for g in shown),
        cores=node.cores,
        memory_mib=node.memory_mib,
        gpus=[_gpu_out(now, node, g, taken.get(g.index), held) for g in shown],
    )


def _held(now: _Moment, node: Node) -> dict[TierId, list[JobView]]:
    """One entry for each reserved GPU of a tier, oldest reservation first."""
    held: dict[TierId, list[JobView]] = defaultdict(list)
    for view in sorted(now.holders, key=lambda v: v.reservation.since_ms if v.reservation else 0):
        where = view.reservation
        if where is not None and where.placement.node == node.name:
            held[where.placement.tier] += [view] * where.count
    return held


def _gpu_out(
    now: _Moment, node: Node, gpu: Gpu, lease: Lease | None, held: dict[TierId, list[JobView]]
) -> wire.GpuOut:
    """Render a GPU; takes one of `held` when it stands for a reserved one."""
    state = _idle_state(now, node, gpu)
    job: JobId | None = None
    lab = None
    if lease is not None:
        job = lease.job
        owner = now.jobs.get(lease.job)
        lab = owner.lab if owner else None
        if node.health is not NodeHealth.OFFLINE:
            state = "run" if _runs(owner, lease) else "ending"
    elif state in {"idle", "off"} and gpu.healthy and not gpu.foreign and held[gpu.tier]:
        holder = held[gpu.tier].pop(0)
        state, job, lab = "reserved", holder.id, holder.lab
    return wire.GpuOut(
        index=gpu.index,
        tier=gpu.tier,
        state=state,
        uuid=gpu.uuid,
        simulated=gpu.simulated,
        job=job,
        lab=lab,
    )


def _runs(owner: Job | None, lease: Lease) -> bool:
    """Whether the job still wants these GPUs, or they are only not yet seen free."""
    return (
        owner is not None
        and owner.state in ACTIVE
        and owner.state is not JobState.CANCELLING
        and owner.epoch == lease.epoch
    )


def _idle_state(now: _Moment, node: Node, gpu: Gpu) -> str:
    """State of a GPU that no job has."""
    view = now.views.get(PlacementId(node=node.name, tier=gpu.tier))
    if node.health is NodeHealth.OFFLINE:
        return "off"
    if not gpu.healthy:
        return "sick"
    if gpu.foreign:
        return "foreign"
    if node.drained:
        return "drained"
    # Suspected, not ready, resting, or of a tier that is unknown or inactive.
    return "idle" if view is not None and view.takes_work else "off"


# -- one tier ------------------------------------------------------------------------


def _tier(now: _Moment, tier: Tier, nodes: Iterable[wire.NodeOut]) -> wire.PoolTier:
    gpus = [g for n in nodes for g in n.gpus if g.tier == tier.name]
    states = Counter(g.state for g in gpus)
    run = states["run"] + states["ending"]
    return wire.PoolTier(
        name=tier.name,
        vram_gb=tier.vram_gb,
        tflops=tier.mtflops / 1000,
        max_gpus=tier.max_gpus,
        sort_order=tier.sort_order,
        active=tier.active,
        simulated=any(g.simulated for g in gpus),
        run=run,
        reserved=states["reserved"],
        idle=states["idle"],
        down=len(gpus) - run - states["reserved"] - states["idle"],
        start_now=states["idle"] if now.phase is Phase.NORMAL else 0,
        next_free_ms=_next_free_ms(now, tier),
    )


def _next_free_ms(now: _Moment, tier: Tier) -> int | None:
    """When the first running job of the tier reaches its time limit; None: nobody knows."""
    ends = []
    for lease in now.leases:
        job = now.jobs.get(lease.job)
        if job is None or lease.placement.tier != tier.name or not _runs(job, lease):
            continue
        limit_s = job.request.time_limit_s
        if limit_s is not None and job.state is JobState.RUNNING and job.started_ms:
            ends.append(job.started_ms + limit_s * 1000)
    return min(ends, default=None)
