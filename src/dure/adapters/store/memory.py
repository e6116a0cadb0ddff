"""The store in memory: for tests, the simulator, and trying things out.

It ships, and passes the same contract suite as the SQL stores. A transaction works on
copy-on-write overlays of the tables, so a failed one leaves nothing behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from dure.core.errors import DureError, ErrorCode
from dure.core.events import Event
from dure.core.forecast import Forecast
from dure.core.model import (
    SLOT_STATES,
    TERMINAL,
    WAITING,
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
)
from dure.ports import AlreadyBooked, GpuTaken, JobFilter, Reads, Replay, Token, Writes

_GONE: Any = object()
_TABLES = (
    "jobs",
    "attempts",
    "gpus",
    "ledger",
    "labs",
    "users",
    "tiers",
    "nodes",
    "tokens",
    "replays",
    "forecasts",
    "facts",
    "events",
    "by_user",
    "open_attempts",
)


class _Overlay:
    """Changes of one transaction above the committed tables."""

    def __init__(self, base: dict[str, dict[Any, Any]]) -> None:
        self.base = base
        self.changes: dict[str, dict[Any, Any]] = {name: {} for name in _TABLES}

    def commit(self) -> None:
        for name, changed in self.changes.items():
            for key, value in changed.items():
                if value is _GONE:
                    self.base[name].pop(key, None)
                else:
                    self.base[name][key] = value


class _Tx:
    """Reads and writes of one transaction."""

    def __init__(self, overlay: _Overlay) -> None:
        self._o = overlay
        self.emitted: list[Event] = []
        self.spoiled = False

    # -- plumbing --

    def _get(self, table: str, key: Any) -> Any:
        value = self._o.changes[table].get(key)
        if value is None:
            value = self._o.base[table].get(key)
        return None if value is _GONE else value

    def _put(self, table: str, key: Any, value: Any) -> None:
        self._o.changes[table][key] = value

    def _drop(self, table: str, key: Any) -> None:
        self._o.changes[table][key] = _GONE

    def _all(self, table: str) -> list[Any]:
        if not self._o.changes[table]:
            return list(self._o.base[table].values())
        merged = {**self._o.base[table], **self._o.changes[table]}
        return [v for v in merged.values() if v is not _GONE]

    # -- jobs --

    def next_job_id(self) -> JobId:
        last = int(self._get("facts", "job_id") or 0) + 1
        self._put("facts", "job_id", last)
        return JobId(last)

    def job(self, job: JobId) -> Job | None:
        found: Job | None = self._get("jobs", job)
        return found

    def jobs(self, ids: Iterable[JobId]) -> dict[JobId, Job]:
        found = {i: self.job(i) for i in ids}
        return {i: j for i, j in found.items() if j is not None}

    def list_jobs(self, wanted: JobFilter) -> list[Job]:
        hits = (j for j in sorted(self._all("jobs"), key=lambda j: -j.id) if _matches(j, wanted))
        return [j for j, _ in zip(hits, range(wanted.limit), strict=False)]

    def live_jobs(self) -> Iterator[Job]:
        return iter([j for j in self.all_jobs() if j.state not in TERMINAL])

    def all_jobs(self) -> Iterator[Job]:
        return iter(sorted(self._all("jobs"), key=lambda j: j.id))

    def _of_user(self, user: UserId) -> list[Job]:
        ids = self._get("by_user", user) or frozenset()
        return [j for i in ids if (j := self.job(i)) is not None]

    def personal_queue(self, user: UserId) -> list[Job]:
        mine = [j for j in self._of_user(user) if j.state is JobState.PERSONAL_QUEUE_WAIT]
        return sorted(mine, key=lambda j: (j.position, j.id))

    def users_with_personal_jobs(self) -> list[UserId]:
        jobs = self._all("jobs")
        return sorted({j.user for j in jobs if j.state is JobState.PERSONAL_QUEUE_WAIT})

    def slots_used(self, user: UserId) -> int:
        return sum(j.state in SLOT_STATES for j in self._of_user(user))

    def waiting_count(self, user: UserId) -> int:
        return sum(j.state in WAITING for j in self._of_user(user))

    def add_jobs(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._put("jobs", job.id, job)
            self._track(job)

    def put_jobs(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self.job(job.id) is None:
                self.spoiled = True
                raise LookupError(f"job {job.id}")
            raised = msgspec.structs.replace(job, version=job.version + 1)
            self._put("jobs", job.id, raised)
            self._track(job)

    def _track(self, job: Job) -> None:
        """Keep only a user's live jobs at hand."""
        ids: frozenset[int] = self._get("by_user", job.user) or frozenset()
        live = ids - {job.id} if job.state in TERMINAL else ids | {job.id}
        if live != ids:
            self._put("by_user", job.user, live)

    # -- attempts and ledger --

    def attempt(self, job: JobId, epoch: int) -> Attempt | None:
        found: Attempt | None = self._get("attempts", (job, epoch))
        return found

    def attempts(self, job: JobId) -> list[Attempt]:
        known = self.job(job)
        epochs = range(1, known.epoch + 1) if known else ()
        return [a for e in epochs if (a := self.attempt(job, e)) is not None]

    def open_attempts(self) -> list[Attempt]:
        keys = sorted(self._all("open_attempts"))
        return [a for j, e in keys if (a := self.attempt(j, e)) is not None]

    def all_attempts(self) -> Iterator[Attempt]:
        return iter(sorted(self._all("attempts"), key=lambda a: (a.job, a.epoch)))

    def ended_attempts(self, *, after_ms: int, limit: int = 5000) -> list[Attempt]:
        ended = [a for a in self._all("attempts") if (a.ended_ms or 0) > after_ms]
        ended.sort(key=lambda a: (-(a.ended_ms or 0), a.job, a.epoch))
        return ended[:limit][::-1]

    def add_attempts(self, attempts: Sequence[Attempt]) -> None:
        for a in attempts:
            for gpu in a.gpus:
                place = (a.placement.node, gpu)
                if self._get("gpus", place) is not None:
                    self.spoiled = True
                    raise GpuTaken(f"GPU {gpu} of {a.placement.node}")
                self._put("gpus", place, (a.job, a.epoch))
            self._put("attempts", (a.job, a.epoch), a)
            self._put("open_attempts", (a.job, a.epoch), (a.job, a.epoch))

    def put_attempts(self, attempts: Sequence[Attempt]) -> None:
        for a in attempts:
            if self.attempt(a.job, a.epoch) is None:
                self.spoiled = True
                raise LookupError(f"attempt {a.job}.{a.epoch}")
            self._put("attempts", (a.job, a.epoch), a)
            if a.freed_ms is not None:
                self._drop("open_attempts", (a.job, a.epoch))
                for gpu in a.gpus:
                    if self._get("gpus", (a.placement.node, gpu)) == (a.job, a.epoch):
                        self._drop("gpus", (a.placement.node, gpu))

    def add_ledger(self, entries: Sequence[LedgerEntry]) -> None:
        for entry in entries:
            key = (entry.job, entry.epoch, entry.kind, entry.segment)
            if self._get("ledger", key) is not None:
                self.spoiled = True
                raise AlreadyBooked(str(key))
            self._put("ledger", key, entry)

    def ledger(
        self, *, lab: LabId | None = None, job: JobId | None = None, since_ms: int = 0
    ) -> list[LedgerEntry]:
        return [
            e
            for e in self._all("ledger")
            if lab in (None, e.lab) and job in (None, e.job) and e.booked_ms >= since_ms
        ]

    # -- people and pool --

    def lab(self, lab: LabId) -> Lab | None:
        found: Lab | None = self._get("labs", lab)
        return found

    def labs(self) -> list[Lab]:
        return sorted(self._all("labs"), key=lambda x: x.name)

    def put_lab(self, lab: Lab) -> None:
        self._put("labs", lab.name, lab)

    def remove_lab(self, lab: LabId) -> None:
        self._drop("labs", lab)

    def user(self, user: UserId) -> User | None:
        found: User | None = self._get("users", user)
        return found

    def users(self) -> list[User]:
        return sorted(self._all("users"), key=lambda x: x.name)

    def put_user(self, user: User) -> None:
        self._put("users", user.name, user)

    def tiers(self) -> list[Tier]:
        return sorted(self._all("tiers"), key=lambda x: x.name)

    def put_tier(self, tier: Tier) -> None:
        self._put("tiers", tier.name, tier)

    def remove_tier(self, tier: TierId) -> None:
        self._drop("tiers", tier)

    def nodes(self) -> list[Node]:
        return sorted(self._all("nodes"), key=lambda x: x.name)

    def put_node(self, node: Node) -> None:
        self._put("nodes", node.name, node)

    def remove_node(self, node: NodeId) -> None:
        self._drop("nodes", node)

    def token(self, digest: str) -> Token | None:
        found: Token | None = self._get("tokens", digest)
        return found

    def tokens(self, user: UserId) -> list[Token]:
        mine = (t for t in self._all("tokens") if t.user == user)
        return sorted(mine, key=lambda t: (t.created_ms, t.digest))

    def put_token(self, token: Token) -> None:
        self._put("tokens", token.digest, token)

    def remove_token(self, digest: str) -> None:
        self._drop("tokens", digest)

    def phase(self) -> Phase:
        return Phase(self._get("facts", "phase") or Phase.NORMAL)

    def put_phase(self, phase: Phase) -> None:
        self._put("facts", "phase", phase)

    def replay(self, user: UserId, key: str) -> Replay | None:
        found: Replay | None = self._get("replays", (user, key))
        return found

    def put_replay(self, replay: Replay) -> None:
        self._put("replays", (replay.user, replay.key), replay)

    def put_forecasts(self, forecasts: Sequence[Forecast]) -> None:
        for made in forecasts:
            self._put("forecasts", (made.job, made.entered_ms), made)

    def open_forecasts(self) -> list[Forecast]:
        return [f for f in self.forecasts(since_ms=0) if f.started_ms is None]

    def forecasts_of(self, jobs: Iterable[JobId]) -> list[Forecast]:
        wanted = set(jobs)
        return [f for f in self.forecasts(since_ms=0) if f.job in wanted]

    def forecasts(self, *, since_ms: int) -> list[Forecast]:
        found = (f for f in self._all("forecasts") if f.made_ms >= since_ms)
        return sorted(found, key=lambda f: (f.made_ms, f.job))

    def forget_replays(self, before_ms: int) -> None:
        for old in self._all("replays"):
            if old.created_ms < before_ms:
                self._drop("replays", (old.user, old.key))

    # -- events --

    def emit(self, events: Sequence[Event]) -> None:
        last = self.last_event_id()
        for offset, event in enumerate(events, 1):
            numbered = msgspec.structs.replace(event, id=last + offset)
            self._put("events", numbered.id, numbered)
            self.emitted.append(numbered)
        self._put("facts", "event_id", last + len(events))

    def events(self, *, after: int = 0, job: JobId | None = None, limit: int = 1000) -> list[Event]:
        ids = range(after + 1, self.last_event_id() + 1)
        hits = (e for i in ids if (e := self._get("events", i)) and job in (None, e.job))
        return [e for e, _ in zip(hits, range(limit), strict=False)]

    def last_event_id(self) -> int:
        return int(self._get("facts", "event_id") or 0)


class MemoryStore:
    """A `Store` that forgets everything when the process ends."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[Any, Any]] = {name: {} for name in _TABLES}
        self._lock = threading.RLock()
        self._writing = False
        self._tell: list[Callable[[list[Event]], None]] = []

    @contextmanager
    def read(self) -> Iterator[Reads]:
        """A view of what is committed; the lock stands in for a database snapshot."""
        with self._lock:
            yield _Tx(_Overlay(self._tables))

    @contextmanager
    def write(self) -> Iterator[Writes]:
        """One transaction; an exception leaves nothing behind."""
        with self._lock:
            if self._writing:
                raise RuntimeError("a write transaction inside another one")
            self._writing = True
            try:
                overlay = _Overlay(self._tables)
                tx = _Tx(overlay)
                yield tx
                if tx.spoiled:
                    # Half a batch is in the overlay: the same answer as the SQL stores.
                    raise DureError(ErrorCode.STORE_FAILED, reason="went on after a refusal")
                overlay.commit()
            finally:
                self._writing = False
            if tx.emitted:
                for tell in self._tell:
                    tell(tx.emitted)

    def subscribe(self, tell: Callable[[list[Event]], None]) -> None:
        """Call `tell` with the events of each commit, inside the writer's lock."""
        self._tell.append(tell)

    def close(self) -> None:
        """Nothing to close."""


def _matches(job: Job, wanted: JobFilter) -> bool:
    return (
        (not wanted.states or job.state in wanted.states)
        and wanted.user in (None, job.user)
        and wanted.lab in (None, job.lab)
        and wanted.name in ("", job.request.name)
        and job.submitted_ms >= wanted.since_ms
        and (wanted.before is None or job.id < wanted.before)
    )
