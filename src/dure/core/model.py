"""The nouns of the policy as frozen values.

Rule: times are integer milliseconds since the Unix epoch (`_ms`), rates are integer
milli-TFLOPS, and a charge is their exact product with GPUs (1e-6 TFLOP-s).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import msgspec

JobId = NewType("JobId", int)
LabId = NewType("LabId", str)
UserId = NewType("UserId", str)
NodeId = NewType("NodeId", str)
TierId = NewType("TierId", str)

MICRO_PER_TFLOP_S = 1_000_000
"""A charge counts 1e-6 TFLOP-s, because GPU-ms times milli-TFLOPS does (P-6)."""


class Value(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all values: frozen, keyword-only, outside the cycle collector."""


class JobState(StrEnum):
    """States of policy 2, in the order of a job's life."""

    PERSONAL_QUEUE_WAIT = "PERSONAL_QUEUE_WAIT"
    GLOBAL_QUEUE_WAIT = "GLOBAL_QUEUE_WAIT"
    NODE_WAIT = "NODE_WAIT"
    DISPATCHED = "DISPATCHED"
    RUNNING = "RUNNING"
    CANCELLING = "CANCELLING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    TIMED_OUT = "TIMED_OUT"
    CANCELLED = "CANCELLED"
    DEAD = "DEAD"


SLOT_STATES = frozenset(
    {
        JobState.GLOBAL_QUEUE_WAIT,
        JobState.NODE_WAIT,
        JobState.DISPATCHED,
        JobState.RUNNING,
        JobState.CANCELLING,
    }
)
"""States in which a job takes one of its user's slots."""
PROMOTED_WAIT = frozenset({JobState.GLOBAL_QUEUE_WAIT, JobState.NODE_WAIT})
WAITING = PROMOTED_WAIT | {JobState.PERSONAL_QUEUE_WAIT}
ACTIVE = frozenset({JobState.DISPATCHED, JobState.RUNNING, JobState.CANCELLING})
TERMINAL = frozenset(
    {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.TIMED_OUT,
        JobState.CANCELLED,
        JobState.DEAD,
    }
)
RETRYABLE = frozenset({JobState.FAILED, JobState.DEAD, JobState.TIMED_OUT})


class Role(StrEnum):
    """What a signed-in person may do: `admin` everything, `member` their own jobs."""

    MEMBER = "member"
    ADMIN = "admin"


class Phase(StrEnum):
    """Maintenance phases of policy 8."""

    NORMAL = "NORMAL"
    DRAINING = "DRAINING"
    BACKFILL_RECOVERY = "BACKFILL_RECOVERY"
    ACTIVE = "ACTIVE"


class NodeHealth(StrEnum):
    """Level 1 of policy 6."""

    STABLE = "STABLE"
    SUSPECTED = "SUSPECTED"
    OFFLINE = "OFFLINE"


class Tier(Value, frozen=True, kw_only=True):
    """A GPU model. `mtflops` is the charge rate in milli-TFLOPS."""

    name: TierId
    vram_gb: float
    mtflops: int
    sort_order: int = 0
    max_gpus: int = 8
    active: bool = True


class Gpu(Value, frozen=True, kw_only=True):
    """One GPU of a node. `simulated` marks a slot that an operator declared."""

    index: int
    tier: TierId
    uuid: str = ""
    healthy: bool = True
    foreign: bool = False
    retired: bool = False
    simulated: bool = False


class Node(Value, frozen=True, kw_only=True):
    """A machine with GPUs, reached through one backend."""

    name: NodeId
    backend: str
    gpus: tuple[Gpu, ...] = ()
    health: NodeHealth = NodeHealth.STABLE
    drained: bool = False
    drain_reason: str = ""
    ready: bool = True
    penalty_until_ms: int = 0
    last_seen_ms: int = 0
    cores: int = 0
    memory_mib: int = 0
    reserve_mib: int = 0


class Limits(Value, frozen=True, kw_only=True):
    """Narrowing limits of a lab or user (policy 9); None narrows nothing."""

    slots: int | None = None
    num_gpus: int | None = None
    waiting: int | None = None
    max_time_limit_s: int | None = None


class Lab(Value, frozen=True, kw_only=True):
    """A lab with its decayed usage: `usage_micro` held at `as_of_ms` (P-7)."""

    name: LabId
    title: str = ""
    weight: float = 1.0
    usage_micro: float = 0.0
    as_of_ms: int = 0
    limits: Limits = Limits()


class User(Value, frozen=True, kw_only=True):
    """A person. Leaving or moving never touches past charges."""

    name: UserId
    lab: LabId
    role: Role = Role.MEMBER
    active: bool = True
    limits: Limits = Limits()
    unix_uid: int = 0
    """Whom their jobs run as where the server may choose; 0: nobody was named."""


class RetryOn(StrEnum):
    """`loss`: lost leases and OOM only; `error`: a non-zero exit too (costs the lab)."""

    LOSS = "loss"
    ERROR = "error"


class Retry(Value, frozen=True, kw_only=True):
    """How often counted failures are repeated before DEAD."""

    max: int | None = None
    """None: the policy's `max_retries`."""
    on: RetryOn = RetryOn.LOSS


class PreStopSignal(Value, frozen=True, kw_only=True):
    """A signal sent `before_s` seconds before the time limit."""

    signal: str
    before_s: int


class JobRequest(Value, frozen=True, kw_only=True):
    """What a user asked for; never changes after submit except by PATCH."""

    name: str
    lab: LabId
    command: tuple[str, ...]
    env: dict[str, str] = {}
    workspace: str = ""
    num_gpus: int = 1
    tiers: tuple[TierId, ...] = ()
    min_vram_gb: float = 0
    node: NodeId | None = None
    time_limit_s: int | None = None
    not_before_ms: int = 0
    retry: Retry = Retry()
    oom_escalate: bool = True
    idempotent: bool = False
    pre_stop_signal: PreStopSignal | None = None
    data: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    track: bool = False
    notify: tuple[str, ...] = ()
    output: str = ""
    workdir: str = ""
    labels: dict[str, str] = {}


class PlacementId(Value, frozen=True, kw_only=True, order=True):
    """The GPUs of one tier in one node."""

    node: NodeId
    tier: TierId


class Skip(Value, frozen=True, kw_only=True, order=True):
    """A placement that refused this job's launch, left out until `until_ms`."""

    placement: PlacementId
    until_ms: int


class Shape(Value, frozen=True, kw_only=True):
    """All that decides where a job fits; jobs of one shape are interchangeable.

    `floor_gb` is the VRAM floor rounded up to a tier's; `host_mib` the host memory that
    an attempt exhausted (0: none): a placement must offer more.
    """

    num_gpus: int
    tiers: tuple[TierId, ...] = ()
    node: NodeId | None = None
    floor_gb: float = 0
    host_mib: int = 0
    skips: tuple[Skip, ...] = ()


class Reservation(Value, frozen=True, kw_only=True):
    """`count` GPUs of a placement held since `since_ms`, at the rate of that moment."""

    placement: PlacementId
    count: int
    since_ms: int
    mtflops: int


class Segment(Value, frozen=True, kw_only=True):
    """A finished piece of a reservation, to be charged with the attempt it led to."""

    placement: PlacementId
    gpus: int
    from_ms: int
    to_ms: int
    mtflops: int


class JobView(Value, frozen=True, kw_only=True):
    """What the scheduler needs to know of one job."""

    id: JobId
    lab: LabId
    user: UserId
    state: JobState
    shape: Shape
    entered_ms: int = 0
    eligible_ms: int = 0
    epoch: int = 0
    reservation: Reservation | None = None


class Lease(Value, frozen=True, kw_only=True):
    """GPUs taken by one epoch of one job, until they are seen free."""

    job: JobId
    epoch: int
    placement: PlacementId
    gpus: tuple[int, ...]


class OomKind(StrEnum):
    """Whose memory ran out."""

    GPU = "gpu"
    HOST = "host"


class Outcome(StrEnum):
    """How an attempt ended (policy 5's table)."""

    COMPLETED = "completed"
    ERROR = "error"
    GPU_OOM = "gpu_oom"
    HOST_OOM = "host_oom"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    NODE_LOST = "node_lost"
    LEASE_EXPIRED = "lease_expired"
    LAUNCH_REFUSED = "launch_refused"
    DRAINED = "drained"


class Evidence(Value, frozen=True, kw_only=True):
    """What is known of an ended attempt; the verdict is drawn from this alone."""

    exit_code: int | None = None
    signal: int | None = None
    oom_kill: int = 0
    scheduler_state: str = ""
    exception: str = ""
    stderr_tail: str = ""
    timed_out: bool = False
    vram_limited: bool = False
    """The slot's declared VRAM was enforced as the process's memory limit."""
    term_ms: int = 0
    """When SIGTERM was sent, by the node's wall clock; 0: never."""
    kill_ms: int = 0
    """When SIGKILL followed for what was left; 0: never."""
    full: tuple[str, ...] = ()
    """Limits of policy 9 that were reached: `output`, `log`."""


class Attempt(Value, frozen=True, kw_only=True):
    """One dispatch. `start_no` is JOB_ATTEMPT, 0 while no process has started."""

    job: JobId
    epoch: int
    lab: LabId
    placement: PlacementId
    gpus: tuple[int, ...]
    mtflops: int
    vram_gb: float
    simulated: bool
    dispatched_ms: int
    start_no: int = 0
    started_ms: int | None = None
    last_seen_ms: int | None = None
    ended_ms: int | None = None
    freed_ms: int | None = None
    outcome: Outcome | None = None
    evidence: Evidence | None = None
    segments: tuple[Segment, ...] = ()
    booked_to_ms: int | None = None
    """Run time is in the ledger up to here: set when a lost lease was charged."""
    run_segments: int = 0
    stop: str = ""
    """The stop kind asked of the backend, so that it is asked again after a crash."""
    stop_ms: int = 0
    detail: str = ""


class Job(Value, frozen=True, kw_only=True):
    """A job with everything that changes during its life."""

    id: JobId
    user: UserId
    request: JobRequest
    state: JobState
    submitted_ms: int
    version: int = 1
    position: float = 0
    held: bool = False
    entered_ms: int = 0
    eligible_ms: int = 0
    waiting_for: str = ""
    """Reason code behind `eligible_ms`: RETRY_BACKOFF or LAUNCH_RETRY."""
    epoch: int = 0
    starts: int = 0
    retries: int = 0
    refusals: int = 0
    node_lost_count: int = 0
    node_wait_count: int = 0
    node_wait_since_ms: int = 0
    floor_gb: float = 0
    host_mib: int = 0
    skips: tuple[Skip, ...] = ()
    reservation: Reservation | None = None
    segments: tuple[Segment, ...] = ()
    next_segment: int = 0
    lost_reservation: bool = False
    fit_lost: bool = False
    cancel_ms: int = 0
    started_ms: int = 0
    ended_ms: int = 0
    exit_code: int | None = None
    error: str = ""
    """Stable code of a failed end: OOM_NO_LARGER_TIER, HOST_OOM, LAUNCH_FAILED, …"""
    error_params: dict[str, str | int | float] = {}
    array_id: int | None = None
    array_index: int | None = None
    after: tuple[int, ...] = ()

    @property
    def lab(self) -> LabId:
        """The lab that pays."""
        return self.request.lab

    def floor(self) -> float:
        """VRAM in GB that a tier must have: asked for, or raised by an OOM."""
        return max(self.request.min_vram_gb, self.floor_gb)


class LedgerKind(StrEnum):
    """What a ledger line is for; start-up, eviction wait and lost tail are written off."""

    RUN = "run"
    RESERVED = "reserved"
    START_UP = "start_up"
    EVICTION_WAIT = "eviction_wait"
    LOST_TAIL = "lost_tail"
    OPENING = "opening"
    """Use from before Dure, entered or imported by an administrator: `to_ms` holds the
    cost itself (gpus 1, mtflops 1, from 0)."""


CHARGED = frozenset({LedgerKind.RUN, LedgerKind.RESERVED, LedgerKind.OPENING})


class LedgerEntry(Value, frozen=True, kw_only=True):
    """One append-only line; (job, epoch, kind, segment) is unique."""

    job: JobId
    epoch: int
    kind: LedgerKind
    segment: int
    lab: LabId
    user: UserId
    placement: PlacementId
    gpus: int
    from_ms: int
    to_ms: int
    mtflops: int
    booked_ms: int

    @property
    def gpu_ms(self) -> int:
        """GPU-milliseconds of this line."""
        return self.gpus * (self.to_ms - self.from_ms)

    @property
    def cost_micro(self) -> int:
        """Exact charge in 1e-6 TFLOP-s; 0 for what is written off."""
        return self.gpu_ms * self.mtflops if self.kind in CHARGED else 0
