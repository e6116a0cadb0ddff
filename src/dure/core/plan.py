"""Snapshot in, plan out: both frozen and serialisable, so a cycle can be replayed."""

from __future__ import annotations

from enum import StrEnum

from dure.core.model import JobId, JobView, LabId, Phase, PlacementId, Value
from dure.core.placement import PlacementView


class ReasonCode(StrEnum):
    """Why a job waits (policy 11)."""

    PERSONAL_LIMIT = "PERSONAL_LIMIT"
    RANK_BEHIND = "RANK_BEHIND"
    SAME_LAB_BEHIND = "SAME_LAB_BEHIND"
    NO_FREE_GPU = "NO_FREE_GPU"
    NEEDS_ONE_NODE = "NEEDS_ONE_NODE"
    RESERVING = "RESERVING"
    RESERVATION_LOST = "RESERVATION_LOST"
    NEXT_CYCLE = "NEXT_CYCLE"
    OOM_ESCALATED = "OOM_ESCALATED"
    NODE_WAIT = "NODE_WAIT"
    NODE_OFFLINE = "NODE_OFFLINE"
    NODE_SUSPECTED = "NODE_SUSPECTED"
    NODE_DRAINED = "NODE_DRAINED"
    NODE_PENALTY = "NODE_PENALTY"
    GPU_UNAVAILABLE = "GPU_UNAVAILABLE"
    RETRY_BACKOFF = "RETRY_BACKOFF"
    LAUNCH_RETRY = "LAUNCH_RETRY"
    NOT_BEFORE = "NOT_BEFORE"
    HELD = "HELD"
    LAB_LIMIT = "LAB_LIMIT"
    FIT_LOST = "FIT_LOST"
    MAINTENANCE = "MAINTENANCE"


class Reason(Value, frozen=True, kw_only=True):
    """A reason code with the parameters its sentence needs."""

    code: ReasonCode
    params: dict[str, str | int | float] = {}


class ReleaseCause(StrEnum):
    """Which rule ends a reservation."""

    LOST_RANK = "R3"
    SWAPPED = "R4_swap"
    USED = "R4_dispatch"
    BROKEN = "R5"


class LabKey(Value, frozen=True, kw_only=True):
    """A lab's place in the line; smaller goes first, equal keys share a line.

    `use_micro` is the use that `key` was made of, as of the snapshot's time.
    """

    lab: LabId
    key: int
    use_micro: float = 0.0
    weight: float = 1.0


class Snapshot(Value, frozen=True, kw_only=True):
    """Everything one cycle decides on.

    `candidates` stand in rank order: every job that could be dispatched in this cycle, and
    `head`, the job of rank 1, if there is one. `holders` hold reservations, at any rank.
    `elders` are candidates past the policy's age bound, oldest first.
    """

    cycle: int
    now_ms: int
    phase: Phase
    placements: tuple[PlacementView, ...]
    candidates: tuple[JobView, ...]
    head: JobId | None
    holders: tuple[JobView, ...]
    lab_keys: tuple[LabKey, ...] = ()
    elders: tuple[JobId, ...] = ()


class Release(Value, frozen=True, kw_only=True, tag="release"):
    """End a reservation; charged at once unless it leads to the job's own dispatch."""

    job: JobId
    placement: PlacementId
    gpus: int
    cause: ReleaseCause


class Dispatch(Value, frozen=True, kw_only=True, tag="dispatch"):
    """Start a job on these GPUs, evicting replicas from some of them."""

    job: JobId
    placement: PlacementId
    gpus: tuple[int, ...]
    evict: tuple[int, ...] = ()


class Absorb(Value, frozen=True, kw_only=True, tag="absorb"):
    """Grow a reservation inside its placement to `count` GPUs."""

    job: JobId
    placement: PlacementId
    count: int


class Reserve(Value, frozen=True, kw_only=True, tag="reserve"):
    """Take `count` GPUs of a placement for the job of rank 1."""

    job: JobId
    placement: PlacementId
    count: int


Decision = Release | Dispatch | Absorb | Reserve


class Plan(Value, frozen=True, kw_only=True):
    """Decisions in the order they apply, and why each other job looked at waits.

    `order` is the order looked at, where it is not that of the snapshot's candidates.
    """

    cycle: int
    decisions: tuple[Decision, ...]
    reasons: dict[JobId, Reason]
    order: tuple[JobId, ...] = ()
