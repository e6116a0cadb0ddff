"""The queue, the personal queue, and what a submit would do."""

from __future__ import annotations

from dure.core.model import JobState, Phase
from dure.wire.fields import Out
from dure.wire.jobs import EtaOut, PlacementNoteOut, ReasonOut, ReservationOut


class QueueRow(Out, frozen=True, kw_only=True):
    """A promoted waiting job in the line."""

    rank: int | None
    job: int
    name: str
    lab: str
    user: str
    state: JobState
    num_gpus: int
    min_vram_gb: float
    tiers: list[str]
    waited_s: int
    lab_usage_tflop_s: str
    reservation: ReservationOut | None
    reason: ReasonOut
    eta: EtaOut | None = None


class LabLine(Out, frozen=True, kw_only=True):
    """A lab's place in the line."""

    lab: str
    usage_tflop_s: str
    weight: float
    waiting: int


class QueueOut(Out, frozen=True, kw_only=True):
    """GET /v1/queue: the order the scheduler uses, at one moment."""

    as_of_ms: int
    cycle: int
    phase: Phase
    labs: list[LabLine]
    items: list[QueueRow]
    personal: int
    node_wait: int
    next: str | None = None


class PersonalRow(Out, frozen=True, kw_only=True):
    """A job of the caller's personal queue, in the order the user gave."""

    job: int
    name: str
    num_gpus: int
    held: bool
    reason: ReasonOut


class PersonalQueueOut(Out, frozen=True, kw_only=True):
    """GET /v1/me/queue."""

    slots_used: int
    slots_limit: int
    items: list[PersonalRow]


class PreviewOut(Out, frozen=True, kw_only=True):
    """POST /v1/submit/preview: what would happen."""

    fits: list[PlacementNoteOut]
    starts_now: bool
    ahead: int
    slots_used: int
    slots_limit: int
    cost_per_hour_tflop_s: dict[str, str]
    lab_usage_tflop_s: str
    eta: EtaOut | None = None


class CalibrationOut(Out, frozen=True, kw_only=True):
    """GET /v1/forecasts/calibration: how often starts fell inside their P20-P80 band."""

    scored: int
    inside: int
    early: int
    late: int
    inside_share: float | None
    days: int
