"""The structs of the HTTP API: what travels, with its limits.

Rule: `/v1` only grows. Large integers (charges, usage) travel as strings, times as integer
milliseconds since the Unix epoch, and every unit ends its name.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dure.core.model import JobState, NodeHealth, Phase, RetryOn, Role

NO_NUL = r"^[^\x00]*$"
CODE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$(?!\n)"
"""Python's `$` also matches before a last line feed, JSON Schema's does not."""

Code = Annotated[str, Meta(pattern=CODE, description="letters, digits, '.', '_', '-'; at most 63")]
ShortText = Annotated[str, Meta(max_length=200, pattern=NO_NUL)]
Argument = Annotated[str, Meta(max_length=131_072, pattern=NO_NUL)]
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$(?!\n)")]
LabelName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$(?!\n)")]
Gigabytes = Annotated[float, Meta(ge=0, le=10_000)]
TimeMs = Annotated[int, Meta(ge=0, le=253_402_300_799_000)]
JobNumber = Annotated[int, Meta(ge=1, le=9_223_372_036_854_775_807)]
Param = str | int | float | bool | None


class In(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of request bodies: a misspelt field is refused, not ignored."""


class Out(msgspec.Struct, frozen=True, kw_only=True):
    """Base of responses."""


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


class LimitsIn(In, frozen=True, kw_only=True):
    """Narrower limits; null narrows nothing."""

    slots: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    num_gpus: Annotated[int, Meta(ge=1, le=8)] | None = None
    waiting: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    max_time_limit_s: Annotated[int, Meta(ge=1, le=315_360_000)] | None = None


class LabIn(In, frozen=True, kw_only=True):
    """PUT /v1/labs/{name}. `opening_tflop_s` adds use from before Dure to the account."""

    title: ShortText = ""
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    limits: LimitsIn = LimitsIn()
    opening_tflop_s: Annotated[float, Meta(ge=0, le=1e18)] = 0


class LabOut(Out, frozen=True, kw_only=True):
    """A lab with its decayed usage of now."""

    name: str
    title: str
    weight: float
    usage_tflop_s: str
    members: int
    limits: LimitsIn


class LabList(Out, frozen=True, kw_only=True):
    """All labs, least used first."""

    items: list[LabOut]


class UserIn(In, frozen=True, kw_only=True):
    """PUT /v1/users/{name}."""

    lab: Code
    role: Role = Role.MEMBER
    active: bool = True
    limits: LimitsIn = LimitsIn()


class UserOut(Out, frozen=True, kw_only=True):
    """A person."""

    name: str
    lab: str
    role: Role
    active: bool
    limits: LimitsIn
    slots_used: int
    slots_limit: int


class UserList(Out, frozen=True, kw_only=True):
    """All users."""

    items: list[UserOut]


class TokenIn(In, frozen=True, kw_only=True):
    """POST /v1/tokens. An administrator may name another user."""

    label: ShortText = ""
    user: Code | None = None
    days: Annotated[int, Meta(ge=1, le=3650)] = 90


class TokenOut(Out, frozen=True, kw_only=True):
    """A token; `secret` is shown once, when it is made."""

    id: str
    user: str
    label: str
    created_ms: int
    expires_ms: int
    last_used_ms: int
    secret: str | None = None


class TokenList(Out, frozen=True, kw_only=True):
    """The caller's tokens."""

    items: list[TokenOut]


class LedgerLine(Out, frozen=True, kw_only=True):
    """One line of the account."""

    job: int
    epoch: int
    kind: str
    segment: int
    user: str
    node: str
    tier: str
    gpus: int
    from_ms: int
    to_ms: int
    cost_tflop_s: str
    booked_ms: int


class UsageOut(Out, frozen=True, kw_only=True):
    """GET /v1/labs/{name}/usage: decayed use, and the lines that made it."""

    lab: str
    as_of_ms: int
    usage_tflop_s: str
    charged_tflop_s: str
    run_tflop_s: str
    reserved_tflop_s: str
    opening_tflop_s: str
    lines: list[LedgerLine]
    next: str | None = None


class PreviewOut(Out, frozen=True, kw_only=True):
    """POST /v1/submit/preview: what would happen."""

    fits: list[PlacementNoteOut]
    starts_now: bool
    ahead: int
    slots_used: int
    slots_limit: int
    cost_per_hour_tflop_s: dict[str, str]
    lab_usage_tflop_s: str


class MeOut(Out, frozen=True, kw_only=True):
    """Who the token belongs to."""

    user: str
    lab: str
    role: Role
    server_version: str


class HealthOut(Out, frozen=True, kw_only=True):
    """GET /healthz."""

    status: str
    version: str
    as_of_ms: int


class MaintenanceOut(Out, frozen=True, kw_only=True):
    """GET /v1/maintenance/status; needs no login."""

    phase: Phase


class MaintenanceIn(In, frozen=True, kw_only=True):
    """PUT /v1/maintenance."""

    phase: Phase


class FieldError(Out, frozen=True, kw_only=True):
    """Where something is wrong, and what: a JSON pointer into the body, `?name` or `Header:`."""

    pointer: str
    detail: str


class Problem(Out, frozen=True, kw_only=True):
    """RFC 9457 problem details; `code` is stable, `detail` is for people."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str = ""
    trace_id: str = ""
    errors: list[FieldError] = []
    params: dict[str, Param] = {}
    nearest_placement: dict[str, str] | None = None
    failed_constraint: str | None = None
    nearest_requests: list[dict[str, Param]] = []
