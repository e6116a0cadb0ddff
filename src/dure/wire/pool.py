"""Nodes, GPUs and tiers."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from dure.core.model import NodeHealth
from dure.wire.fields import In, Out, ShortText


class GpuOut(Out, frozen=True, kw_only=True):
    """One GPU: state is run, reserved, idle, ending, foreign, sick, off or drained."""

    index: int
    tier: str
    state: str
    uuid: str
    simulated: bool
    job: int | None = None
    lab: str | None = None


class NodeOut(Out, frozen=True, kw_only=True):
    """A node with its GPUs. Its ETag is needed to change it."""

    name: str
    backend: str
    health: NodeHealth
    drained: bool
    drain_reason: str
    simulated: bool
    cores: int
    memory_mib: int
    gpus: list[GpuOut]


class NodePatch(In, frozen=True, kw_only=True):
    """PATCH /v1/nodes/{name}; `force` also stops what runs (policy 5, drain --force)."""

    drained: bool | UnsetType = UNSET
    drain_reason: ShortText = ""
    force: bool = False


class NodeList(Out, frozen=True, kw_only=True):
    """All nodes."""

    items: list[NodeOut]


class PoolTier(Out, frozen=True, kw_only=True):
    """A tier's GPUs by what they do now."""

    name: str
    vram_gb: float
    tflops: float
    max_gpus: int
    sort_order: int
    active: bool
    simulated: bool
    run: int
    reserved: int
    idle: int
    down: int
    start_now: int
    next_free_ms: int | None


class PoolOut(Out, frozen=True, kw_only=True):
    """GET /v1/pool."""

    as_of_ms: int
    tiers: list[PoolTier]
    nodes: list[NodeOut]


class TierOut(Out, frozen=True, kw_only=True):
    """A GPU model."""

    name: str
    vram_gb: float
    tflops: float
    sort_order: int
    max_gpus: int
    active: bool


class TierList(Out, frozen=True, kw_only=True):
    """All tiers, best first."""

    items: list[TierOut]


class TierIn(In, frozen=True, kw_only=True):
    """PUT /v1/tiers/{name}."""

    vram_gb: Annotated[float, Meta(gt=0, le=10_000)]
    tflops: Annotated[float, Meta(ge=0.001, le=1_000_000)]
    sort_order: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 0
    max_gpus: Annotated[int, Meta(ge=1, le=8)] = 8
    active: bool = True
