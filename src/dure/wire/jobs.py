"""Jobs, their attempts, events and reasons."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from dure.core.model import JobState, RetryOn
from dure.wire.fields import (
    NO_NUL,
    Argument,
    Code,
    EnvName,
    Gigabytes,
    In,
    JobNumber,
    LabelName,
    Out,
    Param,
    ShortText,
    TimeMs,
)


class RetryIn(In, frozen=True, kw_only=True):
    """How often a job is repeated, and after what."""

    max: Annotated[int, Meta(ge=0, le=100)] | None = None
    on: RetryOn = RetryOn.LOSS


class PreStopSignalIn(In, frozen=True, kw_only=True):
    """A signal some seconds before the time limit."""

    signal: Annotated[str, Meta(pattern=r"^(SIG)?(USR1|USR2|INT|HUP|TERM)$(?!\n)")]
    before_s: Annotated[int, Meta(ge=1, le=86_400)]


class JobIn(In, frozen=True, kw_only=True):
    """POST /v1/jobs, /v1/submit/preview."""

    command: Annotated[list[Argument], Meta(min_length=1, max_length=1000)]
    name: ShortText = ""
    lab: Code | None = None
    env: Annotated[dict[EnvName, Argument], Meta(max_length=500)] = {}
    num_gpus: Annotated[int, Meta(ge=1, le=8)] = 1
    tiers: Annotated[list[Code], Meta(max_length=50)] = []
    min_vram_gb: Gigabytes = 0
    node: Code | None = None
    time_limit_s: Annotated[int, Meta(ge=1, le=315_360_000)] | None = None
    not_before_ms: TimeMs = 0
    retry: RetryIn = RetryIn()
    oom_escalate: bool = True
    idempotent: bool = False
    pre_stop_signal: PreStopSignalIn | None = None
    workdir: Annotated[str, Meta(max_length=4096, pattern=NO_NUL)] = ""
    labels: Annotated[dict[LabelName, ShortText], Meta(max_length=64)] = {}
    hold: bool = False


class JobPatch(In, frozen=True, kw_only=True):
    """PATCH /v1/jobs/{id}: what may change while a job waits (time limit also later)."""

    name: ShortText | UnsetType = UNSET
    num_gpus: Annotated[int, Meta(ge=1, le=8)] | UnsetType = UNSET
    tiers: Annotated[list[Code], Meta(max_length=50)] | UnsetType = UNSET
    min_vram_gb: Gigabytes | UnsetType = UNSET
    node: Code | UnsetType | None = UNSET
    time_limit_s: Annotated[int, Meta(ge=1, le=315360000)] | UnsetType | None = UNSET
    not_before_ms: TimeMs | UnsetType = UNSET


class OrderIn(In, frozen=True, kw_only=True):
    """PUT /v1/me/queue: the personal queue in its new order (jobs left out keep theirs)."""

    jobs: Annotated[list[JobNumber], Meta(min_length=1, max_length=1000)]


class PlacementOut(Out, frozen=True, kw_only=True):
    """Where an attempt runs or ran."""

    node: str
    tier: str
    gpus: list[int]
    simulated: bool = False


class ReservationOut(Out, frozen=True, kw_only=True):
    """GPUs held for a waiting job."""

    node: str
    tier: str
    count: int
    since_ms: int


class CancelOut(Out, frozen=True, kw_only=True):
    """The clocks of a cancel: both are shown to the user."""

    asked_ms: int
    checkpoint_until_ms: int
    kill_at_ms: int


class ErrorOut(Out, frozen=True, kw_only=True):
    """Why a job failed, as a stable code and a sentence."""

    code: str
    text: str
    params: dict[str, Param] = {}


class ChargeOut(Out, frozen=True, kw_only=True):
    """What a job was charged so far, exactly, in 1e-6 TFLOP-s and in TFLOP-s."""

    total_tflop_s: str
    run_tflop_s: str
    reserved_tflop_s: str
    written_off_gpu_s: str


class JobOut(Out, frozen=True, kw_only=True):
    """One job."""

    id: int
    name: str
    lab: str
    user: str
    state: JobState
    state_text: str
    command: list[str]
    num_gpus: int
    tiers: list[str]
    min_vram_gb: float
    node: str | None
    time_limit_s: int | None
    oom_escalate: bool
    labels: dict[str, str]
    submitted_ms: int
    queue_entered_ms: int | None
    eligible_ms: int | None
    not_before_ms: int | None
    started_ms: int | None
    ended_ms: int | None
    exit_code: int | None
    held: bool
    epoch: int
    starts: int
    retries: int
    version: int
    placement: PlacementOut | None = None
    reservation: ReservationOut | None = None
    cancel: CancelOut | None = None
    error: ErrorOut | None = None
    charge: ChargeOut | None = None
    output_dir: str | None = None
    rank: int | None = None


class JobPage(Out, frozen=True, kw_only=True):
    """A page of jobs, newest first; `next` is an opaque cursor."""

    items: list[JobOut]
    next: str | None = None


class ReasonOut(Out, frozen=True, kw_only=True):
    """A reason with its sentence in the caller's language."""

    code: str
    text: str
    params: dict[str, Param] = {}


class PlacementNoteOut(Out, frozen=True, kw_only=True):
    """A placement as it concerns one job."""

    node: str
    tier: str
    idle: int
    capacity: int
    in_service: bool
    fits: bool
    lacks: str = ""
    free_at_ms: int | None = None


class EtaOut(Out, frozen=True, kw_only=True):
    """When a job may start: a band from rehearsals over past run times; null: unknown."""

    p20_ms: int
    p50_ms: int | None
    p80_ms: int | None
    made_ms: int
    text: str
    after: int | None = None


class HintOut(Out, frozen=True, kw_only=True):
    """A change of the request (`dure edit`) with which the job would start now."""

    change: str
    value: Param
    node: str
    tier: str
    text: str


class RankChangeOut(Out, frozen=True, kw_only=True):
    """A charge that moved the job's lab in the line; of another lab's, members see no amount."""

    lab: str
    job: int | None
    at_ms: int
    charged_tflop_s: str | None
    own: bool
    text: str


class WhyOut(Out, frozen=True, kw_only=True):
    """GET /v1/jobs/{id}/why."""

    job: int
    state: JobState
    state_text: str
    reason: ReasonOut | None
    more: list[ReasonOut] = []
    rank: int | None = None
    ahead_labs: list[str] = []
    placements: list[PlacementNoteOut] = []
    eta: EtaOut | None = None
    sooner: list[HintOut] = []
    changes: list[RankChangeOut] = []


class AttemptOut(Out, frozen=True, kw_only=True):
    """One dispatch of a job."""

    epoch: int
    start_no: int
    placement: PlacementOut
    dispatched_ms: int
    started_ms: int | None
    ended_ms: int | None
    freed_ms: int | None
    outcome: str | None
    exit_code: int | None
    signal: int | None
    detail: str
    stderr_tail: str = ""
    term_ms: int = 0
    """When SIGTERM was sent; 0: never."""
    kill_ms: int = 0
    """When SIGKILL followed; 0: never."""
    full: tuple[str, ...] = ()
    """Limits that were reached: `output` (writing files failed), `log` (the rest is missing)."""


class EventOut(Out, frozen=True, kw_only=True):
    """One row of the event stream."""

    id: int
    name: str
    at_ms: int
    text: str
    job: int | None = None
    epoch: int = 0
    lab: str | None = None
    node: str | None = None
    actor: str = ""
    params: dict[str, Param] = {}


class EventPage(Out, frozen=True, kw_only=True):
    """Events in commit order."""

    items: list[EventOut]
    next: str | None = None


class AttemptList(Out, frozen=True, kw_only=True):
    """All attempts of a job, oldest first."""

    items: list[AttemptOut]
