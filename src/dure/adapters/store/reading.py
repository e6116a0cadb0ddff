"""Questions to a SQL store inside one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sqlalchemy import Connection, Select, Table, bindparam, func, select, tuple_

from dure.adapters.store import rows, schema
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
    Phase,
    Tier,
    User,
    UserId,
)
from dure.ports import JobFilter, Replay, Token

CHUNK = 500
"""Ids in one IN list, and rows of one page of a long listing."""

_j, _a, _e = schema.jobs.c, schema.attempts.c, schema.events.c
_JOB = select(*(_j[name] for name in rows.JOB_FIXED + rows.JOB_CHANGING))
_JOB_BY_ID = _JOB.where(_j.id == bindparam("id"))
_JOBS_BY_ID = _JOB.where(_j.id.in_(bindparam("ids", expanding=True)))
_JOBS_PAGE = _JOB.where(_j.id > bindparam("last")).order_by(_j.id).limit(CHUNK)
_IN_STATES = _j.state.in_(bindparam("states", expanding=True))
_IDS_IN_STATES = select(_j.id).where(_IN_STATES)
_PERSONAL = _JOB.where(
    _j.state == JobState.PERSONAL_QUEUE_WAIT.value, _j.user == bindparam("user")
).order_by(_j.position, _j.id)
_PERSONAL_USERS = select(_j.user).where(_j.state == JobState.PERSONAL_QUEUE_WAIT.value).distinct()
_COUNT = select(func.count()).where(_IN_STATES, _j.user == bindparam("user"))
_ATTEMPT = select(*(_a[name] for name in rows.ATTEMPT_KEY + rows.ATTEMPT_CHANGING))
_ATTEMPT_BY_KEY = _ATTEMPT.where(_a.job == bindparam("job"), _a.epoch == bindparam("epoch"))
_NEWEST_ATTEMPTS = _ATTEMPT.join(schema.jobs, (_j.id == _a.job) & (_j.epoch == _a.epoch)).where(
    _j.id.in_(bindparam("ids", expanding=True))
)
_ATTEMPTS_OF = _ATTEMPT.where(_a.job == bindparam("job")).order_by(_a.epoch)
_OPEN = _ATTEMPT.where(_a.freed_ms.is_(None)).order_by(_a.job, _a.epoch)
_ATTEMPTS_PAGE = (
    _ATTEMPT.where(tuple_(_a.job, _a.epoch) > tuple_(bindparam("job"), bindparam("epoch")))
    .order_by(_a.job, _a.epoch)
    .limit(CHUNK)
)
_EVENTS = select(_e.body).order_by(_e.id)
_TOKEN = select(schema.tokens.c.body).where(schema.tokens.c.digest == bindparam("digest"))
_TOKENS = select(schema.tokens.c.body).where(schema.tokens.c.user == bindparam("user"))
_REPLAY = select(schema.replays).where(
    schema.replays.c.user == bindparam("user"), schema.replays.c.key == bindparam("key")
)
_f = schema.forecasts.c
_FORECAST = select(*(_f[name] for name in rows.FORECAST)).order_by(_f.made_ms, _f.job)
_FORECASTS_OF = _FORECAST.where(_f.job.in_(bindparam("ids", expanding=True)))
_OPEN_FORECASTS = _FORECAST.where(_f.started_ms.is_(None))
_FORECASTS = _FORECAST.where(_f.made_ms >= bindparam("since"))
_ENDED = (
    _ATTEMPT.where(_a.ended_ms > bindparam("after"))
    .order_by(_a.ended_ms.desc(), _a.job, _a.epoch)
    .limit(bindparam("limit"))
)
_FACT = select(schema.facts.c.value).where(schema.facts.c.key == bindparam("key"))
_BODIES = {
    t.name: select(t.c.body) for t in (schema.labs, schema.users, schema.tiers, schema.nodes)
}
_BODY = {
    t.name: select(t.c.body).where(t.c.name == bindparam("name"))
    for t in (schema.labs, schema.users)
}

SLOTS = sorted(state.value for state in SLOT_STATES)
WAITS = sorted(state.value for state in WAITING)
LIVE = sorted(state.value for state in JobState if state not in TERMINAL)


class ReadTx:
    """`Reads` over one connection's transaction."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    # -- plumbing --

    def _rows(self, asked: Select[Any], **values: Any) -> Iterable[Any]:
        return self._conn.execute(asked, values).fetchall()

    def _one(self, asked: Select[Any], **values: Any) -> Any:
        return self._conn.execute(asked, values).scalar()

    def _bodies(self, table: Table) -> list[str]:
        return [row[0] for row in self._rows(_BODIES[table.name])]

    def _seen(self, job: Job) -> Job:
        """Hook of the writing transaction, which remembers what it has read."""
        return job

    # -- jobs --

    def job(self, job: JobId) -> Job | None:
        row = self._conn.execute(_JOB_BY_ID, {"id": job}).fetchone()
        return None if row is None else self._seen(rows.job_of(row))

    def jobs(self, ids: Iterable[JobId]) -> dict[JobId, Job]:
        wanted = list(dict.fromkeys(ids))
        found: dict[JobId, Job] = {}
        for start in range(0, len(wanted), CHUNK):
            for row in self._rows(_JOBS_BY_ID, ids=wanted[start : start + CHUNK]):
                job = self._seen(rows.job_of(row))
                found[job.id] = job
        return {i: found[i] for i in wanted if i in found}

    def list_jobs(self, wanted: JobFilter) -> list[Job]:
        asked = _JOB.order_by(_j.id.desc()).limit(max(0, wanted.limit))
        if wanted.states:
            asked = asked.where(_j.state.in_([state.value for state in wanted.states]))
        if wanted.user is not None:
            asked = asked.where(_j.user == wanted.user)
        if wanted.lab is not None:
            asked = asked.where(_j.lab == wanted.lab)
        if wanted.name:
            asked = asked.where(_j.name == wanted.name)
        if wanted.since_ms:
            asked = asked.where(_j.submitted_ms >= wanted.since_ms)
        if wanted.before is not None:
            asked = asked.where(_j.id < wanted.before)
        return [self._seen(rows.job_of(row)) for row in self._rows(asked)]

    def live_jobs(self) -> Iterator[Job]:
        # The ids first: a page by state would sort all live jobs again for every page.
        ids = sorted(row[0] for row in self._rows(_IDS_IN_STATES, states=LIVE))
        for start in range(0, len(ids), CHUNK):
            chunk = self._rows(_JOBS_BY_ID, ids=ids[start : start + CHUNK])
            yield from sorted(map(rows.job_of, chunk), key=lambda job: job.id)

    def all_jobs(self) -> Iterator[Job]:
        # Pages by key, not one open cursor, so that a caller may write in between.
        last = -1
        while page := [rows.job_of(row) for row in self._rows(_JOBS_PAGE, last=last)]:
            yield from page
            last = page[-1].id

    def personal_queue(self, user: UserId) -> list[Job]:
        return [self._seen(rows.job_of(row)) for row in self._rows(_PERSONAL, user=user)]

    def users_with_personal_jobs(self) -> list[UserId]:
        return sorted(UserId(row[0]) for row in self._rows(_PERSONAL_USERS))

    def slots_used(self, user: UserId) -> int:
        return int(self._one(_COUNT, states=SLOTS, user=user))

    def waiting_count(self, user: UserId) -> int:
        return int(self._one(_COUNT, states=WAITS, user=user))

    # -- attempts and ledger --

    def attempt(self, job: JobId, epoch: int) -> Attempt | None:
        row = self._conn.execute(_ATTEMPT_BY_KEY, {"job": job, "epoch": epoch}).fetchone()
        return None if row is None else rows.attempt_of(row)

    def attempts(self, job: JobId) -> list[Attempt]:
        return [rows.attempt_of(row) for row in self._rows(_ATTEMPTS_OF, job=job)]

    def _newest_attempts(self, ids: list[JobId]) -> Iterator[Attempt]:
        for start in range(0, len(ids), CHUNK):
            yield from map(
                rows.attempt_of, self._rows(_NEWEST_ATTEMPTS, ids=ids[start : start + CHUNK])
            )

    def open_attempts(self) -> list[Attempt]:
        return [rows.attempt_of(row) for row in self._rows(_OPEN)]

    def all_attempts(self) -> Iterator[Attempt]:
        job, epoch = JobId(-1), 0
        while page := list(map(rows.attempt_of, self._rows(_ATTEMPTS_PAGE, job=job, epoch=epoch))):
            yield from page
            job, epoch = page[-1].job, page[-1].epoch

    def ended_attempts(self, *, after_ms: int, limit: int = 5000) -> list[Attempt]:
        newest = self._rows(_ENDED, after=after_ms, limit=limit)
        return [rows.attempt_of(row) for row in newest][::-1]

    def open_forecasts(self) -> list[Forecast]:
        return [rows.forecast_of(row) for row in self._rows(_OPEN_FORECASTS)]

    def forecasts_of(self, jobs: Iterable[JobId]) -> list[Forecast]:
        return [rows.forecast_of(row) for row in self._rows(_FORECASTS_OF, ids=list(jobs))]

    def forecasts(self, *, since_ms: int) -> list[Forecast]:
        return [rows.forecast_of(row) for row in self._rows(_FORECASTS, since=since_ms)]

    def ledger(
        self, *, lab: LabId | None = None, job: JobId | None = None, since_ms: int = 0
    ) -> list[LedgerEntry]:
        asked = select(schema.ledger).order_by(schema.ledger.c.id)
        if lab is not None:
            asked = asked.where(schema.ledger.c.lab == lab)
        if job is not None:
            asked = asked.where(schema.ledger.c.job == job)
        asked = asked.where(schema.ledger.c.booked_ms >= since_ms)
        return [rows.ledger_of(row) for row in self._rows(asked)]

    # -- people and pool --

    def lab(self, lab: LabId) -> Lab | None:
        found = self._one(_BODY["labs"], name=lab)
        return None if found is None else rows.lab_of(found)

    def labs(self) -> list[Lab]:
        # Sorted here: PostgreSQL's order of text depends on how it was installed.
        return sorted(map(rows.lab_of, self._bodies(schema.labs)), key=lambda lab: lab.name)

    def user(self, user: UserId) -> User | None:
        found = self._one(_BODY["users"], name=user)
        return None if found is None else rows.user_of(found)

    def users(self) -> list[User]:
        return sorted(map(rows.user_of, self._bodies(schema.users)), key=lambda user: user.name)

    def tiers(self) -> list[Tier]:
        return sorted(map(rows.tier_of, self._bodies(schema.tiers)), key=lambda tier: tier.name)

    def nodes(self) -> list[Node]:
        return sorted(map(rows.node_of, self._bodies(schema.nodes)), key=lambda node: node.name)

    def token(self, digest: str) -> Token | None:
        found = self._one(_TOKEN, digest=digest)
        return None if found is None else rows.token_of(found)

    def tokens(self, user: UserId) -> list[Token]:
        mine = (rows.token_of(row[0]) for row in self._rows(_TOKENS, user=user))
        return sorted(mine, key=lambda token: (token.created_ms, token.digest))

    def phase(self) -> Phase:
        return Phase(self._one(_FACT, key="phase") or Phase.NORMAL)

    def replay(self, user: UserId, key: str) -> Replay | None:
        row = self._conn.execute(_REPLAY, {"user": user, "key": key}).fetchone()
        return None if row is None else rows.replay_of(row)

    # -- events --

    def events(self, *, after: int = 0, job: JobId | None = None, limit: int = 1000) -> list[Event]:
        asked = _EVENTS.where(_e.id > after).limit(max(0, limit))
        if job is not None:
            asked = asked.where(_e.job == job)
        return [rows.event_of(row[0]) for row in self._rows(asked)]

    def last_event_id(self) -> int:
        return self._counter("event_id")

    def _counter(self, key: str) -> int:
        return int(self._one(_FACT, key=key) or 0)
