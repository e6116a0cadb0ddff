"""What the lease queue of edge nodes and those who use it tell each other.

Rule: the store issues epochs and owns retries. The queue only says who may run right now,
so a status here is a projection; `core.retry` decides what a loss means for the job.
"""

from __future__ import annotations

from enum import StrEnum

from dure.core.model import JobId, NodeHealth, NodeId, Value


class QueueAway(Exception):  # noqa: N818 - says what is so
    """The queue cannot be reached now; nothing is known about what it did last."""


class TaskStatus(StrEnum):
    """Documented states of a task; FAILED waits for its retry, it is not the job's FAILED."""

    PENDING = "PENDING"
    DISPATCHED = "DISPATCHED"
    RUNNING = "RUNNING"
    DONE = "DONE"
    NODE_WAIT = "NODE_WAIT"
    FAILED = "FAILED"
    DEAD = "DEAD"
    CANCELLED = "CANCELLED"


class Task(Value, frozen=True, kw_only=True):
    """One dispatch as it is put into the queue: the store has issued `epoch` already."""

    job: JobId
    epoch: int
    node: NodeId
    payload: bytes
    need_vram_mib: int = 0
    idempotent: bool = False
    max_retries: int = 3


class Enqueued(StrEnum):
    """Answer to one enqueue; KNOWN is the same epoch again, FENCED and STALE never run."""

    QUEUED = "QUEUED"
    KNOWN = "KNOWN"
    FENCED = "FENCED"
    STALE = "STALE"


class Ticket(Value, frozen=True, kw_only=True):
    """What the holder of a lease shows with every call: epoch and a random id."""

    job: JobId
    epoch: int
    lease_id: str


class Claim(Value, frozen=True, kw_only=True):
    """A task that was given out."""

    ticket: Ticket
    payload: bytes


class LeaseBeat(Value, frozen=True, kw_only=True):
    """One lease in a beat. Ages instead of times: nodes' clocks may be wrong."""

    ticket: Ticket
    started_age_ms: int | None = None
    """How long ago the job's process started; None: it has not."""


class NodeReport(Value, frozen=True, kw_only=True):
    """What a beat says about its node; `sample` counts readings of the GPUs."""

    node: NodeId
    gpus: bytes = b"[]"
    """JSON list of `core.model.Gpu`."""
    sample: int = 0
    good: bool = True
    """Whether the reading succeeded and found no foreign use."""
    free_vram_mib: int = 0
    utilisation: int = 0
    cores: int = 0
    memory_mib: int = 0
    reserve_mib: int = 0
    version: str = ""
    address: str = ""
    """Where probes find the node: `host:port` of the agent's own health answer."""


class BeatAnswer(StrEnum):
    """What the holder must do: go on, stop because it lost, stop because it was asked."""

    OK = "OK"
    LOST = "LOST"
    CANCEL = "CANCEL"
    RESUMED = "RESUMED"


class LeaseVerdict(Value, frozen=True, kw_only=True):
    """Answer for one lease; `stop` and `kill_after_s` come with CANCEL."""

    answer: BeatAnswer
    stop: str = ""
    kill_after_s: float = 0.0


class BeatReply(Value, frozen=True, kw_only=True):
    """Answer to a beat, one verdict a lease in the same order."""

    verdicts: tuple[LeaseVerdict, ...] = ()
    state: NodeHealth | None = None
    """How the control plane sees the node; None: it has not looked yet."""


class End(StrEnum):
    """How a lease ends by the word of its holder."""

    DONE = "done"
    """The command has ended: `result` is its evidence."""
    REFUSED = "refused"
    """It could not be started here."""
    BROKEN = "broken"
    """Its supervisor died while the node lived: counts as a failure."""
    GONE = "gone"
    """The machine went down under it: counts nothing."""
    FREED = "freed"
    """Only that no process of it is left; how it ended is known already or is lost."""


class Report(Value, frozen=True, kw_only=True):
    """One end; the same report may come again, and again with `freed`."""

    ticket: Ticket
    end: End
    result: bytes = b""
    detail: str = ""
    age_ms: int = 0
    started_age_ms: int | None = None
    """A short job may end before any beat has told of its start."""
    freed_age_ms: int | None = None


class Commit(StrEnum):
    """Answer to a report. STALE keeps the result as evidence for a day and discards it."""

    OK = "OK"
    DUP = "DUP"
    DIFFERS = "DIFFERS"
    """Already committed with another content; the first one stands."""
    STALE = "STALE"
    TERMINAL = "TERMINAL"
    GONE = "GONE"


class Bye(StrEnum):
    """OFF: the machine goes away, leases are returned. RESTART: only the agent does."""

    OFF = "off"
    RESTART = "restart"


class SweepRule(Value, frozen=True, kw_only=True):
    """How a sweep judges; `run_id` is the queue instance it was armed for."""

    run_id: str = ""
    expected_ms: int = 0
    """The queue's time as the asker reckons it; 0: any. Off by more than `jump_ms`, one of
    the clocks has been set, and times to live mean nothing."""
    jump_ms: int = 5_000
    ack_ms: int = 30_000
    limit: int = 10_000
    brake: bool = True
    """Expire nothing when half of at least three leases would expire at once."""


class Expired(Value, frozen=True, kw_only=True):
    """One lease that a sweep took away, and the state of its node that decided the blame."""

    job: JobId
    epoch: int
    node: NodeId
    state: NodeHealth


class Swept(Value, frozen=True, kw_only=True):
    """What one sweep did: nothing, if run id or time were not as the rule expected."""

    run_id: str
    now_ms: int
    expired: tuple[Expired, ...] = ()
    braked: int = 0
    """Leases that would have expired if the brake had not held."""


class TaskView(Value, frozen=True, kw_only=True):
    """One task as the queue holds it; times by the queue's clock, 0: never."""

    job: JobId
    epoch: int
    status: TaskStatus
    node: NodeId
    started_ms: int = 0
    seen_ms: int = 0
    expired_ms: int = 0
    expired_state: NodeHealth = NodeHealth.STABLE
    returned: bool = False
    """The expiry was a good-bye of the node."""
    resumed_ms: int = 0
    done_ms: int = 0
    freed_ms: int = 0
    detail: str = ""
    result: bytes = b""


class Changes(Value, frozen=True, kw_only=True):
    """Tasks that changed after a cursor, oldest change first, and the cursor to ask with."""

    now_ms: int
    cursor: int
    tasks: tuple[TaskView, ...] = ()


class Projection(Value, frozen=True, kw_only=True):
    """What the store decided after a loss, for display and RESUME; never a way to run."""

    job: JobId
    epoch: int
    status: TaskStatus
    retries: int = 0
    due_ms: int = 0
    node_wait_count: int = 0
    node_lost_count: int = 0


class NodeView(Value, frozen=True, kw_only=True):
    """One node as the queue holds it; times by the queue's clock."""

    report: NodeReport
    last_seen_ms: int = 0
    last_sample_ms: int = 0
    bye: Bye | None = None
    bye_ms: int = 0
    state: NodeHealth | None = None
    ready: bool = False
    penalty: int = 0
    penalty_until_ms: int = 0


class NodeViews(Value, frozen=True, kw_only=True):
    """All nodes at one moment."""

    now_ms: int
    nodes: tuple[NodeView, ...] = ()


class NodeMark(Value, frozen=True, kw_only=True):
    """The watchdog's verdict on a node, written where sweep and agents read it."""

    node: NodeId
    state: NodeHealth
    ready: bool
    failures: int = 0
    good_samples: int = 0
    penalty: int = 0
    penalty_until_ms: int = 0
    dead: bool = False
    """Its connection is confirmed dead: idempotent jobs need not wait for their lease."""
