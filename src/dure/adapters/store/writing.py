"""Changes to a SQL store inside one transaction.

Nobody else writes while the transaction is open, so what it has read or written once it
need not ask for again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, delete
from sqlalchemy.exc import IntegrityError

from dure.adapters.store import rows, schema
from dure.adapters.store.reading import ReadTx
from dure.adapters.store.statements import Statements
from dure.core.events import Event
from dure.core.forecast import Forecast
from dure.core.model import (
    WAITING,
    Attempt,
    Job,
    JobId,
    Lab,
    LabId,
    LedgerEntry,
    Node,
    NodeId,
    Phase,
    Tier,
    TierId,
    User,
)
from dure.ports import AlreadyBooked, GpuTaken, Replay, Token


class WriteTx(ReadTx):
    """`Writes` over one connection's transaction."""

    def __init__(self, conn: Connection, statements: Statements) -> None:
        super().__init__(conn)
        self._do = statements
        self._known: dict[JobId, Job] = {}
        self._attempts: dict[tuple[JobId, int], Attempt] = {}
        self._looked: set[JobId] = set()
        self._counters: dict[str, int] = {}
        self.emitted: list[Event] = []
        self.spoiled = ""
        """Why this transaction can only be rolled back, if it can."""

    def finish(self) -> None:
        """Write what was held back to the end."""
        self._do.put_fact.many(
            self._conn, [(key, str(value)) for key, value in self._counters.items()]
        )

    def _counter(self, key: str) -> int:
        if key not in self._counters:
            return super()._counter(key)
        return self._counters[key]

    # -- jobs --

    def _seen(self, job: Job) -> Job:
        self._known[job.id] = job
        return job

    def next_job_id(self) -> JobId:
        self._counters["job_id"] = self._counter("job_id") + 1
        return JobId(self._counters["job_id"])

    def job(self, job: JobId) -> Job | None:
        return self._known.get(job) or super().job(job)

    def jobs(self, ids: Iterable[JobId]) -> dict[JobId, Job]:
        wanted = list(ids)
        super().jobs([i for i in wanted if i not in self._known])
        return {i: self._known[i] for i in wanted if i in self._known}

    def add_jobs(self, jobs: Sequence[Job]) -> None:
        self._do.add_jobs.many(
            self._conn, [rows.job_fixed(job) + rows.job_changing(job) for job in jobs]
        )
        for job in jobs:
            self._seen(job)

    def put_jobs(self, jobs: Sequence[Job]) -> None:
        usual: list[tuple[Any, ...]] = []
        whole: list[tuple[Any, ...]] = []
        for given in jobs:
            known = self._known.get(given.id)
            job = self._seen(msgspec.structs.replace(given, version=given.version + 1))
            if known is not None and _same_request(known, job):
                usual.append((*rows.job_changing(job), job.id))
            else:
                whole.append((*rows.job_fixed(job)[1:], *rows.job_changing(job), job.id))
        touched = self._do.put_jobs.many(self._conn, usual)
        touched += self._do.put_jobs_whole.many(self._conn, whole)
        self._all_there(touched, len(jobs), "jobs")

    def _all_there(self, touched: int, given: int, what: str) -> None:
        if touched != given:
            self.spoiled = f"{given - touched} of {given} {what} to be replaced are not there"
            raise LookupError(self.spoiled)

    # -- attempts and ledger --

    def attempt(self, job: JobId, epoch: int) -> Attempt | None:
        if (job, epoch) not in self._attempts:
            self._look_ahead(job)
        if (job, epoch) not in self._attempts:
            found = super().attempt(job, epoch)
            return None if found is None else self._keep(found)
        return self._attempts[job, epoch]

    def _keep(self, attempt: Attempt) -> Attempt:
        self._attempts[attempt.job, attempt.epoch] = attempt
        return attempt

    def _look_ahead(self, job: JobId) -> None:
        """Read the newest attempts of all jobs at hand: a batch asks for them one by one."""
        if job not in self._known or job in self._looked:
            return
        ids = [i for i, j in self._known.items() if j.epoch and j.state not in WAITING]
        ids = [i for i in ids if i not in self._looked]
        self._looked.update(ids)
        for attempt in self._newest_attempts(ids):
            if (attempt.job, attempt.epoch) not in self._attempts:
                self._keep(attempt)

    def add_attempts(self, attempts: Sequence[Attempt]) -> None:
        taken = [(a.placement.node, gpu, a.job, a.epoch) for a in attempts for gpu in a.gpus]
        try:
            self._do.take_gpus.many(self._conn, taken)
        except IntegrityError as error:
            self.spoiled = "a GPU was taken"
            raise GpuTaken(" ".join(str(error.orig).split())) from error
        self._do.add_attempts.many(
            self._conn, [(a.job, a.epoch, *rows.attempt_changing(a)) for a in attempts]
        )
        for attempt in attempts:
            self._keep(attempt)

    def put_attempts(self, attempts: Sequence[Attempt]) -> None:
        touched = self._do.put_attempts.many(
            self._conn, [(*rows.attempt_changing(a), a.job, a.epoch) for a in attempts]
        )
        self._all_there(touched, len(attempts), "attempts")
        for attempt in attempts:
            self._keep(attempt)
        freed = (a for a in attempts if a.freed_ms is not None)
        self._do.free_gpus.many(
            self._conn, [(a.placement.node, gpu, a.job, a.epoch) for a in freed for gpu in a.gpus]
        )

    def add_ledger(self, entries: Sequence[LedgerEntry]) -> None:
        if not entries:
            return
        try:
            self._conn.execute(schema.ledger.insert(), [rows.ledger_row(e) for e in entries])
        except IntegrityError as error:
            self.spoiled = "a ledger line was booked already"
            raise AlreadyBooked(" ".join(str(error.orig).split())) from error

    # -- people and pool --

    def _put(self, table: str, name: str, value: msgspec.Struct) -> None:
        self._do.put_named[table].many(self._conn, [(name, rows.body(value))])

    def put_lab(self, lab: Lab) -> None:
        self._put("labs", lab.name, lab)

    def remove_lab(self, lab: LabId) -> None:
        self._conn.execute(delete(schema.labs).where(schema.labs.c.name == lab))

    def put_user(self, user: User) -> None:
        self._put("users", user.name, user)

    def put_tier(self, tier: Tier) -> None:
        self._put("tiers", tier.name, tier)

    def remove_tier(self, tier: TierId) -> None:
        self._conn.execute(delete(schema.tiers).where(schema.tiers.c.name == tier))

    def put_node(self, node: Node) -> None:
        self._put("nodes", node.name, node)

    def remove_node(self, node: NodeId) -> None:
        self._conn.execute(delete(schema.nodes).where(schema.nodes.c.name == node))

    def put_token(self, token: Token) -> None:
        self._do.put_token.many(self._conn, [(token.digest, token.user, rows.body(token))])

    def remove_token(self, digest: str) -> None:
        self._conn.execute(delete(schema.tokens).where(schema.tokens.c.digest == digest))

    def put_phase(self, phase: Phase) -> None:
        self._do.put_fact.many(self._conn, [("phase", phase.value)])

    def put_replay(self, replay: Replay) -> None:
        self._do.put_replay.many(
            self._conn,
            [(replay.user, replay.key, replay.fingerprint, replay.created_ms, replay.response)],
        )

    def put_forecasts(self, forecasts: Sequence[Forecast]) -> None:
        self._do.put_forecasts.many(self._conn, [rows.forecast_row(f) for f in forecasts])

    def forget_replays(self, before_ms: int) -> None:
        self._conn.execute(delete(schema.replays).where(schema.replays.c.created_ms < before_ms))

    # -- events --

    def emit(self, events: Sequence[Event]) -> None:
        last = self._counter("event_id")
        numbered = [
            msgspec.structs.replace(event, id=last + offset)
            for offset, event in enumerate(events, 1)
        ]
        self._do.emit.many(self._conn, [rows.event_row(event) for event in numbered])
        self._counters["event_id"] = last + len(numbered)
        self.emitted += numbered


def _same_request(known: Job, job: Job) -> bool:
    """Whether only the changing columns differ; identity, because that costs nothing."""
    return (
        known.request is job.request
        and known.user == job.user
        and known.submitted_ms == job.submitted_ms
    )
