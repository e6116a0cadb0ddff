"""Slurm's nodes as Dure's: tiers by GRES type or partition, foreign use, Slurm's own reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dure.adapters.compute.slurm.parse import Gres, NodeLine
from dure.core.model import Gpu, Node, NodeHealth, NodeId, TierId, Value

AWAY = frozenset(
    {
        "DOWN",
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "ERROR",
        "FAIL",
        "FAILING",
        "FUTURE",
        "INVAL",
        "MAINT",
        "REBOOT_ISSUED",
        "UNKNOWN",
    }
)
"""States in which Slurm gives the node to nobody."""
KEPT = frozenset({"PLANNED", "RESERVED", "BLOCKED"})
"""Slurm keeps the node for somebody: what Dure sent there would wait."""


class Mapped(Value, frozen=True, kw_only=True):
    """How this site's GPUs are named, and which nodes are Dure's to use."""

    tiers: Mapping[str, str] = {}
    """Tier by GRES type, or by partition for GPUs without a type."""
    partitions: Mapping[str, str] = {}
    """Partition to submit to, by tier."""
    preemptible: tuple[str, ...] = ()
    """Partitions whose jobs yield: their GPUs are idle to research."""
    nodes: tuple[str, ...] = ()
    reserve_mib: int = 0
    simulated: bool = False

    def tier(self, kind: str, partitions: Iterable[str]) -> str:
        """Tier of GPUs of this GRES type on a node of these partitions."""
        if kind:
            return self.tiers.get(kind, kind)
        named = (self.tiers[p] for p in partitions if p in self.tiers)
        return next(named, "gpu")

    def partition(self, tier: str, partitions: Iterable[str]) -> str:
        """Where a job for this tier is submitted; empty: nowhere."""
        there = [p for p in partitions if p not in self.preemptible]
        wanted = self.partitions.get(tier, "")
        if wanted:
            return wanted if wanted in there else ""
        return there[0] if there else ""


class Slot(Value, frozen=True, kw_only=True):
    """Where launches for one placement go."""

    partition: str
    gres_type: str


def slots(line: NodeLine, mapped: Mapped) -> dict[str, Slot]:
    """Partition and GRES type by tier."""
    found = {}
    for part in line.gres:
        tier = mapped.tier(part.type, line.partitions)
        partition = mapped.partition(tier, line.partitions)
        if partition:
            found[tier] = Slot(partition=partition, gres_type=part.type)
    return found


def usable(line: NodeLine, mapped: Mapped) -> bool:
    """Whether Dure may use this node at all."""
    chosen = not mapped.nodes or line.name in mapped.nodes
    return bool(line.gres) and chosen and bool(slots(line, mapped))


def node(
    line: NodeLine,
    mapped: Mapped,
    *,
    own: int = 0,
    leased: frozenset[int] = frozenset(),
    preemptible: int = 0,
    now_ms: int = 0,
) -> Node:
    """A node; `own` GPUs of its use are Dure's, `preemptible` ones yield.

    Slurm picks the device when the job starts, so an index here only counts. Foreign use is
    therefore shown on the last indices that no lease of Dure holds.
    """
    used = sum(part.count for part in line.used)
    foreign = max(0, used - own - preemptible)
    gpus = [
        Gpu(index=index, tier=TierId(tier), simulated=mapped.simulated)
        for index, tier in enumerate(_tiers(line.gres, mapped, line.partitions))
    ]
    for place in reversed(range(len(gpus))):
        if foreign and place not in leased:
            gpus[place] = Gpu(
                index=place, tier=gpus[place].tier, simulated=mapped.simulated, foreign=True
            )
            foreign -= 1
    health = _health(line)
    return Node(
        name=NodeId(line.name),
        backend="slurm",
        gpus=tuple(gpus),
        health=health,
        drain_reason=_reason(line),
        ready=not KEPT & set(line.states),
        last_seen_ms=now_ms if health is NodeHealth.STABLE else 0,
        cores=line.cores,
        memory_mib=line.memory_mib,
        reserve_mib=mapped.reserve_mib,
    )


def _tiers(parts: Iterable[Gres], mapped: Mapped, partitions: tuple[str, ...]) -> list[str]:
    return [mapped.tier(part.type, partitions) for part in parts for _ in range(part.count)]


def _health(line: NodeLine) -> NodeHealth:
    if AWAY & set(line.states):
        return NodeHealth.OFFLINE
    return NodeHealth.STABLE if line.responding else NodeHealth.SUSPECTED


def _reason(line: NodeLine) -> str:
    """Slurm's own words for why the node takes no work; empty if it does."""
    kept = [s for s in line.states if s in AWAY or s in KEPT]
    if not line.responding:
        kept.append("NOT_RESPONDING")
    if not kept:
        return ""
    return f"Slurm: {'+'.join(kept)}" + (f", {line.reason}" if line.reason else "")
