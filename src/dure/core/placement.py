"""Placements, and which jobs fit them (P-1 to P-5).

`Pool` is a fold over events: it is kept up to date, never reloaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from dure.core.model import (
    Job,
    JobId,
    Lease,
    Node,
    NodeHealth,
    NodeId,
    PlacementId,
    Shape,
    Tier,
    TierId,
    Value,
)


class PlacementView(Value, frozen=True, kw_only=True):
    """One placement as the planner sees it.

    `capacity` counts every GPU not retired, sick or off ones too. `free` are the indices
    that could take research now if the node took work; `frozen` says the node is
    SUSPECTED: reservations are kept but neither grow nor start.
    """

    id: PlacementId
    tier: Tier
    capacity: int
    in_service: bool
    takes_work: bool
    frozen: bool
    free: tuple[int, ...]
    replicas: tuple[int, ...] = ()
    healthy_free: int = 0
    healthy: int = 0
    """GPUs, free or busy, that are neither sick nor taken by a foreign process."""
    host_mib_per_gpu: int = 0
    simulated: bool = False
    drained: bool = False
    health: NodeHealth = NodeHealth.STABLE

    @property
    def idle(self) -> int:
        """GPUs that could take research in this cycle, reserved ones included."""
        return len(self.free) if self.takes_work else 0


def fits(shape: Shape, view: PlacementView) -> bool:
    """P-1: static fit, whatever is busy or off. Skips are dynamic and not looked at.

    The same checks as `failed_constraint`, likeliest to fail first: a cycle asks often.
    """
    tier = view.tier
    return (
        view.capacity >= shape.num_gpus <= tier.max_gpus
        and tier.active
        and tier.vram_gb >= shape.floor_gb
        and (not shape.tiers or tier.name in shape.tiers)
        and (shape.node is None or shape.node == view.id.node)
        and (not shape.host_mib or view.host_mib_per_gpu * shape.num_gpus > shape.host_mib)
    )


def failed_constraint(shape: Shape, view: PlacementView) -> str | None:
    """Name of the first static constraint that `view` fails, or None if the job fits."""
    tier = view.tier
    checks = (
        ("tier_inactive", tier.active),
        ("node", shape.node is None or shape.node == view.id.node),
        ("tiers", not shape.tiers or tier.name in shape.tiers),
        ("min_vram_gb", tier.vram_gb >= shape.floor_gb),
        ("max_gpus", tier.max_gpus >= shape.num_gpus),
        ("capacity", view.capacity >= shape.num_gpus),
        (
            "host_memory",
            view.host_mib_per_gpu * shape.num_gpus > shape.host_mib or not shape.host_mib,
        ),
    )
    return next((name for name, ok in checks if not ok), None)


def usable(shape: Shape, view: PlacementView) -> bool:
    """Whether `view` fits, is in service and has not just refused this job."""
    if not (view.in_service and fits(shape, view)):
        return False
    return not shape.skips or all(skip.placement != view.id for skip in shape.skips)


def rounded_floor(floor_gb: float, tiers: Iterable[Tier]) -> float:
    """VRAM floor rounded up to a tier's, so that few shapes exist; 0 stays 0."""
    if floor_gb <= 0:
        return 0
    return min((t.vram_gb for t in tiers if t.vram_gb >= floor_gb), default=floor_gb)


def shape_of(job: Job, now_ms: int) -> Shape:
    """The job's shape; skips that have run out are left out."""
    request = job.request
    return Shape(
        num_gpus=request.num_gpus,
        tiers=tuple(sorted(request.tiers)),
        node=request.node,
        floor_gb=job.floor(),
        host_mib=job.host_mib,
        skips=tuple(sorted(s for s in job.skips if s.until_ms > now_ms)),
    )


class Share(Value, frozen=True, kw_only=True):
    """CPU cores and memory that come with a job's GPUs (P-5)."""

    cores: int
    memory_mib: int


def share(node: Node, num_gpus: int) -> Share:
    """P-5: n of a node's N GPUs, all tiers, in service or not."""
    total = max(1, sum(not g.retired for g in node.gpus))
    return Share(
        cores=max(1, num_gpus * node.cores // total),
        memory_mib=num_gpus * max(0, node.memory_mib - node.reserve_mib) // total,
    )


class Pool:
    """Tiers, nodes and leases, folded from events, seen as placements."""

    def __init__(self) -> None:
        self.tiers: dict[TierId, Tier] = {}
        self.nodes: dict[NodeId, Node] = {}
        self.leases: dict[tuple[JobId, int], Lease] = {}
        self.replicas: dict[PlacementId, frozenset[int]] = {}
        self.version = 0
        self._used: dict[NodeId, set[int]] = {}
        self._views: dict[PlacementId, PlacementView] = {}
        self._stale: set[NodeId] = set()
        self._ordered: tuple[PlacementView, ...] | None = ()
        self._penalised: set[NodeId] = set()

    def copy(self) -> Pool:
        """A pool of its own with the same tiers, nodes and leases, to try things out on."""
        made = Pool()
        made.tiers, made.nodes = dict(self.tiers), dict(self.nodes)
        made.leases, made.replicas = dict(self.leases), dict(self.replicas)
        made._used = {node: set(used) for node, used in self._used.items()}
        made._views, made._stale = dict(self._views), set(self._stale)
        made._ordered, made._penalised = self._ordered, set(self._penalised)
        return made

    def put_tier(self, tier: Tier) -> None:
        """Add or replace a tier."""
        self.tiers[tier.name] = tier
        self._touch(*self.nodes)

    def put_node(self, node: Node) -> None:
        """Add or replace a node with its GPUs."""
        self.nodes[node.name] = node
        if node.penalty_until_ms:
            self._penalised.add(node.name)
        self._touch(node.name)

    def remove_node(self, name: NodeId) -> None:
        """Forget a node."""
        self.nodes.pop(name, None)
        self._penalised.discard(name)
        self._touch(name)

    def remove_tier(self, name: TierId) -> None:
        """Forget a tier."""
        self.tiers.pop(name, None)
        self._touch(*self.nodes)

    def take(self, lease: Lease) -> None:
        """GPUs of a lease are not idle any more."""
        self.leases[lease.job, lease.epoch] = lease
        self._used.setdefault(lease.placement.node, set()).update(lease.gpus)
        self._touch(lease.placement.node, shape_changed=False)

    def release(self, job: JobId, epoch: int) -> None:
        """GPUs of a lease were seen free."""
        lease = self.leases.pop((job, epoch), None)
        if lease is not None:
            self._used[lease.placement.node].difference_update(lease.gpus)
            self._touch(lease.placement.node, shape_changed=False)

    def views(self, now_ms: int = 0) -> tuple[PlacementView, ...]:
        """All placements, by node and tier; `now_ms` ends penalties."""
        self._stale |= self._penalised
        for name in self._stale:
            self._rebuild(name, now_ms)
        if self._stale or self._ordered is None:
            self._ordered = tuple(self._views[k] for k in sorted(self._views))
            self._stale.clear()
        return self._ordered

    def _touch(self, *names: NodeId, shape_changed: bool = True) -> None:
        self._stale.update(names)
        self._ordered = None
        # Leases come and go without changing what fits or is in service.
        self.version += shape_changed

    def _rebuild(self, name: NodeId, now_ms: int) -> None:
        for key in [k for k in self._views if k.node == name]:
            del self._views[key]
        node = self.nodes.get(name)
        if node is None:
            return
        if node.penalty_until_ms <= now_ms:
            self._penalised.discard(name)
        per_gpu = share(node, 1).memory_mib
        for tier_name in {g.tier for g in node.gpus}:
            tier = self.tiers.get(tier_name)
            if tier is not None:
                key = PlacementId(node=name, tier=tier_name)
                self._views[key] = self._view(node, tier, key, per_gpu, now_ms)

    def _view(
        self, node: Node, tier: Tier, key: PlacementId, per_gpu_mib: int, now_ms: int
    ) -> PlacementView:
        gpus = [g for g in node.gpus if g.tier == tier.name and not g.retired]
        used = self._used.get(node.name, set())
        healthy = tuple(
            g.index for g in gpus if g.healthy and not g.foreign and g.index not in used
        )
        in_service = node.health is not NodeHealth.OFFLINE and not node.drained and tier.active
        suspected = node.health is NodeHealth.SUSPECTED
        takes = in_service and not suspected and node.ready and node.penalty_until_ms <= now_ms
        return PlacementView(
            id=key,
            tier=tier,
            capacity=len(gpus),
            in_service=in_service,
            takes_work=takes,
            frozen=in_service and not takes,
            free=healthy,
            replicas=tuple(sorted(self.replicas.get(key, frozenset()))),
            healthy_free=len(healthy),
            healthy=sum(g.healthy and not g.foreign for g in gpus),
            host_mib_per_gpu=per_gpu_mib,
            simulated=any(g.simulated for g in gpus),
            drained=node.drained,
            health=node.health,
        )


class NoFit(Value, frozen=True, kw_only=True):
    """Why nothing can ever run a request, and what could."""

    nearest: PlacementId | None
    failed: str
    requests: tuple[dict[str, str | int | float], ...]


_CONSTRAINT_ORDER = (
    "tier_inactive",
    "node",
    "tiers",
    "min_vram_gb",
    "host_memory",
    "max_gpus",
    "capacity",
)


def no_fit(shape: Shape, views: Iterable[PlacementView]) -> NoFit:
    """Explain a 422: the nearest placement, what it lacks, and requests that would fit."""
    placements = list(views)
    if not placements:
        return NoFit(nearest=None, failed="no_gpus", requests=())
    ranked = sorted(
        placements,
        key=lambda v: (
            -_CONSTRAINT_ORDER.index(failed_constraint(shape, v) or "capacity"),
            -min(v.capacity, v.tier.max_gpus),
            -v.tier.sort_order,
            v.id,
        ),
    )
    nearest = ranked[0]
    return NoFit(
        nearest=nearest.id,
        failed=failed_constraint(shape, nearest) or "capacity",
        requests=_nearest_requests(shape, ranked),
    )


def _nearest_requests(
    shape: Shape, views: list[PlacementView]
) -> tuple[dict[str, str | int | float], ...]:
    """At most three feasible requests, keeping the user's GPU count where possible."""
    options: dict[tuple[str, int], dict[str, str | int | float]] = {}
    for view in views:
        if not view.tier.active:
            continue
        count = min(shape.num_gpus, view.capacity, view.tier.max_gpus)
        if count >= 1:
            options[view.tier.name, count] = {
                "num_gpus": count,
                "tier": view.tier.name,
                "min_vram_gb": min(shape.floor_gb, view.tier.vram_gb),
            }
    best = sorted(options.values(), key=lambda o: -int(o["num_gpus"]))
    return tuple(best[:3])
