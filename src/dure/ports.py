"""The seams: what the engine needs of the world, as Protocols and plain values.

Every port has an adapter and a fake that ships, and one contract suite runs on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Protocol

from dure.core import lease as lq
from dure.core.events import Event
from dure.core.forecast import Forecast
from dure.core.health import Signal
from dure.core.model import (
    Attempt,
    Evidence,
    Gpu,
    Job,
    JobId,
    JobState,
    Lab,
    LabId,
    LedgerEntry,
    Node,
    NodeHealth,
    NodeId,
    Phase,
    PlacementId,
    Tier,
    TierId,
    User,
    UserId,
    Value,
)


class Clock(Protocol):
    """The one source of time; tests drive it by hand."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch; never less than an earlier answer."""
        ...


class Ids(Protocol):
    """Random names that nobody can guess."""

    def token(self) -> str:
        """A fresh secret with at least 128 bits of randomness."""
        ...


class Notifier(Protocol):
    """Somebody to tell. Calls never raise into the engine."""

    def notify(self, event: Event) -> None:
        """Tell about one committed event."""
        ...


# -- store ---------------------------------------------------------------------------


class Token(Value, frozen=True, kw_only=True):
    """An API token as stored: never the secret, only its SHA-256."""

    digest: str
    user: UserId
    label: str
    created_ms: int
    expires_ms: int
    last_used_ms: int = 0


class Replay(Value, frozen=True, kw_only=True):
    """What an Idempotency-Key has led to; `response` is empty while in flight."""

    user: UserId
    key: str
    fingerprint: str
    created_ms: int
    response: bytes = b""


class JobFilter(Value, frozen=True, kw_only=True):
    """Which jobs a list shows; empty fields filter nothing. Newest first."""

    states: tuple[JobState, ...] = ()
    user: UserId | None = None
    lab: LabId | None = None
    name: str = ""
    since_ms: int = 0
    before: JobId | None = None
    limit: int = 50


class Reads(Protocol):
    """Questions to the store, inside one consistent view."""

    def job(self, job: JobId) -> Job | None: ...
    def jobs(self, ids: Iterable[JobId]) -> dict[JobId, Job]: ...
    def list_jobs(self, wanted: JobFilter) -> list[Job]: ...
    def live_jobs(self) -> Iterator[Job]:
        """Jobs that are not in a terminal state, by id."""
        ...

    def all_jobs(self) -> Iterator[Job]: ...
    def personal_queue(self, user: UserId) -> list[Job]:
        """Jobs in PERSONAL_QUEUE_WAIT in the user's order (position, then id)."""
        ...

    def users_with_personal_jobs(self) -> list[UserId]: ...
    def slots_used(self, user: UserId) -> int: ...
    def waiting_count(self, user: UserId) -> int: ...
    def attempt(self, job: JobId, epoch: int) -> Attempt | None: ...
    def attempts(self, job: JobId) -> list[Attempt]: ...
    def open_attempts(self) -> list[Attempt]:
        """Attempts whose GPUs have not been seen free."""
        ...

    def all_attempts(self) -> Iterator[Attempt]: ...
    def ended_attempts(self, *, after_ms: int, limit: int = 5000) -> list[Attempt]:
        """The newest attempts that ended after `after_ms`, oldest first."""
        ...

    def open_forecasts(self) -> list[Forecast]:
        """Forecasts of which it is not known yet whether they came true."""
        ...

    def forecasts(self, *, since_ms: int) -> list[Forecast]: ...
    def ledger(
        self, *, lab: LabId | None = None, job: JobId | None = None, since_ms: int = 0
    ) -> list[LedgerEntry]: ...
    def lab(self, lab: LabId) -> Lab | None: ...
    def labs(self) -> list[Lab]: ...
    def user(self, user: UserId) -> User | None: ...
    def users(self) -> list[User]: ...
    def tiers(self) -> list[Tier]: ...
    def nodes(self) -> list[Node]: ...
    def token(self, digest: str) -> Token | None: ...
    def tokens(self, user: UserId) -> list[Token]: ...
    def phase(self) -> Phase: ...
    def replay(self, user: UserId, key: str) -> Replay | None: ...
    def events(
        self, *, after: int = 0, job: JobId | None = None, limit: int = 1000
    ) -> list[Event]: ...
    def last_event_id(self) -> int: ...


class Writes(Reads, Protocol):
    """One transaction: all of it is kept, or nothing."""

    def next_job_id(self) -> JobId: ...
    def add_jobs(self, jobs: Sequence[Job]) -> None: ...
    def put_jobs(self, jobs: Sequence[Job]) -> None:
        """Replace jobs; each one's `version` is raised by the store."""
        ...

    def add_attempts(self, attempts: Sequence[Attempt]) -> None:
        """Add attempts with their leases.

        Raises `GpuTaken` if one of the GPUs is still held: I1 in the database itself.
        """
        ...

    def put_attempts(self, attempts: Sequence[Attempt]) -> None:
        """Replace attempts; one that is freed gives up its lease."""
        ...

    def add_ledger(self, entries: Sequence[LedgerEntry]) -> None:
        """Append lines. Raises `AlreadyBooked` if one of them exists."""
        ...

    def put_lab(self, lab: Lab) -> None: ...
    def remove_lab(self, lab: LabId) -> None: ...
    def put_user(self, user: User) -> None: ...
    def put_tier(self, tier: Tier) -> None: ...
    def remove_tier(self, tier: TierId) -> None: ...
    def put_node(self, node: Node) -> None: ...
    def remove_node(self, node: NodeId) -> None: ...
    def put_token(self, token: Token) -> None: ...
    def remove_token(self, digest: str) -> None: ...
    def put_phase(self, phase: Phase) -> None: ...
    def put_replay(self, replay: Replay) -> None: ...
    def forget_replays(self, before_ms: int) -> None: ...
    def put_forecasts(self, forecasts: Sequence[Forecast]) -> None:
        """Add or replace forecasts, by job and time of entry."""
        ...

    def emit(self, events: Sequence[Event]) -> None:
        """Add event rows to this transaction; ids rise in commit order."""
        ...


class Store(Protocol):
    """The only truth about jobs, attempts, charges, settings and events."""

    def read(self) -> AbstractContextManager[Reads]:
        """A consistent view; never blocks writers."""
        ...

    def write(self) -> AbstractContextManager[Writes]:
        """One transaction. Writers go one at a time, over all processes.

        After `GpuTaken`, `AlreadyBooked` or a `LookupError` it can only roll back. It never
        nests. A STORE_FAILED while committing leaves open whether it was kept: event ids
        are contiguous, so a reader finds out with `events(after=last seen)`.
        """
        ...

    def subscribe(self, tell: Callable[[list[Event]], None]) -> None:
        """Call `tell` with the events of each commit made here, in commit order.

        It is called before the next writer begins, and must not write.
        """
        ...

    def close(self) -> None: ...


class GpuTaken(Exception):  # noqa: N818 - says what is so
    """A GPU is still held by another lease."""


class AlreadyBooked(Exception):  # noqa: N818 - says what is so
    """A ledger line with the same (job, epoch, kind, segment) exists."""


# -- compute -------------------------------------------------------------------------


class LeaseKey(Value, frozen=True, kw_only=True):
    """(job, epoch): what a backend is asked about and fenced by."""

    job: JobId
    epoch: int


class StopKind(StrEnum):
    """Signal rows of policy 5: each sends SIGTERM once and has its time of SIGKILL."""

    CANCEL = "cancel"
    LOST = "lost"
    DRAIN = "drain"
    EVICT = "evict"


class LaunchOrder(Value, frozen=True, kw_only=True):
    """Everything a backend needs to start one attempt; the same order may come twice."""

    key: LeaseKey
    placement: PlacementId
    gpus: tuple[int, ...]
    user: UserId
    lab: LabId
    name: str
    command: tuple[str, ...]
    env: dict[str, str]
    workdir: str
    start_no: int
    time_limit_s: int | None = None
    pre_stop_signal: str = ""
    pre_stop_before_s: int = 0
    kill_after_s: float = 30.0
    cores: int = 1
    memory_mib: int = 0
    vram_mib: int = 0
    """Declared VRAM of all granted slots, a real limit where they are simulated."""
    simulated: bool = False
    idempotent: bool = False
    """A second run beside the first one does no harm."""
    copy_from_epoch: int = 0
    """Newest earlier epoch, whose output folder this one starts from; 0: none."""
    unix_uid: int = 0
    """The user's own Unix user; 0: none is known."""


class StopOrder(Value, frozen=True, kw_only=True):
    """Stop what runs under `key`: SIGTERM now, SIGKILL to everything after `kill_after_s`."""

    key: LeaseKey
    kind: StopKind
    kill_after_s: float


class LaunchStatus(StrEnum):
    """Answer to a launch. UNKNOWN is asked again; launches are idempotent."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class LaunchResult(Value, frozen=True, kw_only=True):
    """One answer of a batch."""

    key: LeaseKey
    status: LaunchStatus
    reason: str = ""


class Inventory(Value, frozen=True, kw_only=True):
    """Nodes as the backend sees them; `unreachable` says why they cannot be seen now."""

    nodes: tuple[Node, ...] = ()
    unreachable: str = ""


class Started(Value, frozen=True, kw_only=True, tag="started"):
    """The job's process runs since `at_ms`."""

    key: LeaseKey
    at_ms: int


class Resumed(Value, frozen=True, kw_only=True, tag="resumed"):
    """A lease that was given up goes on."""

    key: LeaseKey
    at_ms: int


class Exited(Value, frozen=True, kw_only=True, tag="exited"):
    """The job's command ended. Its GPUs are another matter: see `Freed`."""

    key: LeaseKey
    at_ms: int
    evidence: Evidence


class Freed(Value, frozen=True, kw_only=True, tag="freed"):
    """No process of the lease lives any more: its GPUs are idle since `at_ms`."""

    key: LeaseKey
    at_ms: int


class Beat(Value, frozen=True, kw_only=True, tag="beat"):
    """The lease was seen alive at `at_ms`."""

    key: LeaseKey
    at_ms: int


class Returned(Value, frozen=True, kw_only=True, tag="returned"):
    """The node said good-bye (`bye`) and gave the lease back."""

    key: LeaseKey
    at_ms: int


class LeaseExpired(Value, frozen=True, kw_only=True, tag="lease_expired"):
    """Nothing was heard of the lease for too long, while its node was in `node_state`."""

    key: LeaseKey
    at_ms: int
    node_state: NodeHealth
    detail: str = ""


class NodeChanged(Value, frozen=True, kw_only=True, tag="node_changed"):
    """A node's state or hardware changed."""

    node: Node


class GpuChanged(Value, frozen=True, kw_only=True, tag="gpu_changed"):
    """One GPU of a node changed (health, foreign use)."""

    node: NodeId
    gpu: Gpu


Observation = (
    Started | Resumed | Exited | Freed | Beat | Returned | LeaseExpired | NodeChanged | GpuChanged
)


class LivePhase(StrEnum):
    """What a backend knows of one lease."""

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


class LiveLease(Value, frozen=True, kw_only=True):
    """A lease the backend knows, for reconciling after a restart."""

    key: LeaseKey
    phase: LivePhase


class ComputeBackend(Protocol):
    """Machines that run jobs. All calls are batches; unreachable is a value."""

    name: str

    def inventory(self) -> Inventory: ...
    def launch(self, orders: Sequence[LaunchOrder]) -> list[LaunchResult]:
        """Start attempts; idempotent by (job, epoch). One answer an order, same order."""
        ...

    def stop(self, orders: Sequence[StopOrder]) -> None:
        """Stop attempts; idempotent, the first order's clock counts. Unknown keys: no-op."""
        ...

    def fence(self, keys: Sequence[LeaseKey]) -> None:
        """Never let these epochs start or report again, and stop them (kind LOST)."""
        ...

    def observe(self, cursor: int) -> tuple[list[Observation], int]:
        """Observations after `cursor`, and the cursor to ask with once they are recorded.

        Nothing is forgotten before a later cursor has been asked with; one from an earlier
        backend object acknowledges nothing. Per lease the order is Started, Exited, Freed,
        or LeaseExpired, Freed; Exited comes without Started when nothing could be executed.
        Observations may be repeated after a restart.
        """
        ...

    def leases(self) -> list[LiveLease]:
        """Leases known here. One stays listed until its `Freed` has been acknowledged."""
        ...

    def watch(self, hint: Callable[[], None]) -> None:
        """Call `hint` (from any thread) whenever `observe` has something new."""
        ...

    def log_path(self, key: LeaseKey) -> str | None:
        """Local path of the attempt's log, if there is one."""
        ...

    def close(self) -> None:
        """Stop observing; running jobs go on."""
        ...


# -- runtime -------------------------------------------------------------------------


class Grant(Value, frozen=True, kw_only=True):
    """What one attempt may use on its node."""

    run_dir: str
    output_dir: str
    gpu_uuids: tuple[str, ...]
    cores: int
    memory_mib: int
    data_limit_mib: int = 0
    """Limit on the process's own memory (RLIMIT_DATA); 0: none."""
    devices: tuple[str, ...] = ()
    """Device nodes of the granted GPUs, with those that every GPU needs."""
    uid: int = 0
    """Unix user and group that the job becomes; 0: it stays the server's own user."""
    processes: int = 0
    """Most processes and threads, where no cgroup limits them; 0: a cgroup does."""


class Inside(Value, frozen=True, kw_only=True):
    """What the first program inside a jail is told: it starts the job's command."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    uid: int = 0
    seccomp: bytes = b""
    """Classic BPF program over system calls; empty: none."""
    processes: int = 0


class RuntimeCommand(Value, frozen=True, kw_only=True):
    """What the supervisor executes."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str = ""
    """Where it is executed; empty: in the job's own folder."""
    files: dict[int, bytes] = {}
    """Open files that it finds, by descriptor: nothing of them shows in `ps`."""
    inside: Inside | None = None
    """Told over descriptor `CONTROL_FD`; None: `argv` is the job's own command."""


CONTROL_FD = 3
"""Where a jail's first program finds its connection to the supervisor."""


class Runtime(Protocol):
    """How a job's process is confined: a pure function of order and grant."""

    name: str
    confines: bool
    """Whether it keeps other people's things out of a job's sight."""

    def command(self, order: LaunchOrder, grant: Grant) -> RuntimeCommand: ...


# -- lease queue ---------------------------------------------------------------------


class LeaseQueue(Protocol):
    """Who may run on an edge node right now. Each step is atomic and may be repeated.

    Every call raises `QueueAway` when the queue cannot be reached. `core.lease` has the
    values; the first half is for the control plane, the second for agents.
    """

    def enqueue(self, tasks: Sequence[lq.Task]) -> list[lq.Enqueued]: ...
    def cancel(self, orders: Sequence[StopOrder]) -> None: ...
    def fence(self, keys: Sequence[LeaseKey]) -> None: ...
    def sweep(self, rule: lq.SweepRule) -> lq.Swept: ...
    def changes(self, after: int, limit: int = 1000) -> lq.Changes: ...
    def settle(self, keys: Sequence[LeaseKey]) -> None: ...
    def project(self, tasks: Sequence[lq.Projection]) -> None: ...
    def requeue(self, jobs: Sequence[JobId]) -> None: ...
    def nodes(self) -> lq.NodeViews: ...
    def mark(self, marks: Sequence[lq.NodeMark]) -> None: ...
    def forget(self, node: NodeId) -> None: ...
    def connected(self) -> frozenset[NodeId] | None:
        """Nodes whose agents hold a connection now; None: this queue cannot tell."""
        ...

    def news(self, timeout_s: float) -> bool: ...

    def claim(self, node: NodeId, lease_ids: Sequence[str]) -> list[lq.Claim]: ...
    def beat(self, report: lq.NodeReport, leases: Sequence[lq.LeaseBeat]) -> lq.BeatReply: ...
    def report(self, reports: Sequence[lq.Report]) -> list[lq.Commit]:
        """`complete` and `fail`: a result counts when the answer is OK or DUP."""
        ...

    def bye(self, node: NodeId, kind: lq.Bye, leases: Sequence[lq.Ticket]) -> None: ...
    def doorbell(self, node: NodeId, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


class Prober(Protocol):
    """Asks a machine whether it is there; answers in its own time limit, never raises."""

    def probe(self, address: str) -> Signal: ...
