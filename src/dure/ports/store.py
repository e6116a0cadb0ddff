"""The store: the only truth about jobs, attempts, charges, settings and events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dure.core.events import Event
from dure.core.forecast import Forecast
from dure.core.model import (
    Attempt,
    Job,
    JobId,
    JobState,
    Lab,
    LabId,
    LedgerEntry,
    Node,
    NodeId,
    Phase,
    Tier,
    TierId,
    User,
    UserId,
    Value,
)


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

    def forecasts_of(self, jobs: Iterable[JobId]) -> list[Forecast]: ...
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
