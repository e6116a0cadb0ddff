"""Machines that run jobs: orders, observations, backends. All calls are batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from dure.core.model import (
    Evidence,
    Gpu,
    JobId,
    LabId,
    Node,
    NodeHealth,
    NodeId,
    PlacementId,
    UserId,
    Value,
)


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
