"""Values to rows and back. Rule: rows never leave this package.

What queries ask for is a column; the rest of a value is JSON, whose fields are taken from
the model itself: a field that the model gains is kept without a word here. Fields at their
default are left out, so a default of `Job` or `Attempt` must go on meaning "not yet".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import astuple

from dure.core.events import Event
from dure.core.forecast import Forecast
from dure.core.model import (
    Attempt,
    Job,
    JobId,
    JobRequest,
    JobState,
    Lab,
    LabId,
    LedgerEntry,
    LedgerKind,
    Node,
    NodeId,
    Outcome,
    PlacementId,
    Reservation,
    Tier,
    TierId,
    User,
    UserId,
)
from dure.ports import Replay, Token

Row = Sequence[Any]


def _rest(model: type[msgspec.Struct], columns: Iterable[str]) -> type[msgspec.Struct]:
    """A struct of the fields of `model` that have no column of their own."""
    kept = [f for f in msgspec.structs.fields(model) if f.name not in set(columns)]
    kept.sort(key=lambda f: not f.required)
    fields: list[Any] = [
        (f.name, f.type)
        if f.required
        else (
            f.name,
            f.type,
            msgspec.field(default_factory=f.default_factory)
            if f.default is msgspec.NODEFAULT
            else f.default,
        )
        for f in kept
    ]
    return msgspec.defstruct(
        f"{model.__name__}Rest", fields, frozen=True, omit_defaults=True, gc=False
    )


JOB_FIXED = ("id", "user", "lab", "name", "submitted_ms", "request")
JOB_CHANGING = (
    "state",
    "position",
    "entered_ms",
    "eligible_ms",
    "epoch",
    "version",
    "held",
    "num_gpus",
    "reserved_node",
    "reserved_tier",
    "reserved_count",
    "reserved_since_ms",
    "reserved_mtflops",
    "array_id",
    "array_index",
    "after",
    "life",
)
ATTEMPT_KEY = ("job", "epoch")
ATTEMPT_CHANGING = (
    "node",
    "tier",
    "dispatched_ms",
    "started_ms",
    "ended_ms",
    "freed_ms",
    "outcome",
    "body",
)

_JobRest: Any = _rest(Job, (*JOB_FIXED, *JOB_CHANGING, "reservation"))
_AttemptRest: Any = _rest(Attempt, (*ATTEMPT_KEY, *ATTEMPT_CHANGING, "placement"))
_job_rest = attrgetter(*_JobRest.__struct_fields__)
_attempt_rest = attrgetter(*_AttemptRest.__struct_fields__)

_encode = msgspec.json.Encoder().encode
_request = msgspec.json.Decoder(JobRequest).decode
_life = msgspec.json.Decoder(_JobRest).decode
_after = msgspec.json.Decoder(tuple[int, ...]).decode
_attempt_body = msgspec.json.Decoder(_AttemptRest).decode

event_of = msgspec.json.Decoder(Event).decode
lab_of = msgspec.json.Decoder(Lab).decode
user_of = msgspec.json.Decoder(User).decode
tier_of = msgspec.json.Decoder(Tier).decode
node_of = msgspec.json.Decoder(Node).decode
token_of = msgspec.json.Decoder(Token).decode


def body(value: msgspec.Struct) -> str:
    """A whole value as JSON text."""
    return _encode(value).decode()


# -- jobs ----------------------------------------------------------------------------


def job_fixed(job: Job) -> tuple[Any, ...]:
    """Values of `JOB_FIXED`: what stays from submit to end, but for a PATCH."""
    request = job.request
    return (job.id, job.user, request.lab, request.name, job.submitted_ms, body(request))


def job_changing(job: Job) -> tuple[Any, ...]:
    """Values of `JOB_CHANGING`."""
    held = job.reservation
    reserved = (
        (None, None, None, None, None)
        if held is None
        else (
            held.placement.node,
            held.placement.tier,
            held.count,
            held.since_ms,
            held.mtflops,
        )
    )
    return (
        job.state.value,
        float(job.position),
        job.entered_ms,
        job.eligible_ms,
        job.epoch,
        job.version,
        job.held,
        job.request.num_gpus,
        *reserved,
        job.array_id,
        job.array_index,
        _encode(job.after).decode() if job.after else "[]",
        body(_JobRest(*_job_rest(job))),
    )


def job_of(row: Row) -> Job:
    """A job from the columns `JOB_FIXED + JOB_CHANGING`."""
    (job_id, user, _lab, _name, submitted_ms, request) = row[:6]
    (state, position, entered_ms, eligible_ms, epoch, version, held, _num_gpus) = row[6:14]
    (node, tier, count, since_ms, mtflops, array_id, array_index, after, life) = row[14:]
    return Job(
        id=JobId(job_id),
        user=UserId(user),
        request=_request(request),
        state=JobState(state),
        submitted_ms=submitted_ms,
        version=version,
        position=position,
        held=bool(held),
        entered_ms=entered_ms,
        eligible_ms=eligible_ms,
        epoch=epoch,
        reservation=None
        if node is None
        else Reservation(
            placement=PlacementId(node=NodeId(node), tier=TierId(tier)),
            count=count,
            since_ms=since_ms,
            mtflops=mtflops,
        ),
        array_id=array_id,
        array_index=array_index,
        after=() if after == "[]" else _after(after),
        **msgspec.structs.asdict(_life(life)),
    )


# -- attempts ------------------------------------------------------------------------


def attempt_changing(attempt: Attempt) -> tuple[Any, ...]:
    """Values of `ATTEMPT_CHANGING`."""
    return (
        attempt.placement.node,
        attempt.placement.tier,
        attempt.dispatched_ms,
        attempt.started_ms,
        attempt.ended_ms,
        attempt.freed_ms,
        None if attempt.outcome is None else attempt.outcome.value,
        body(_AttemptRest(*_attempt_rest(attempt))),
    )


def attempt_of(row: Row) -> Attempt:
    """An attempt from the columns `ATTEMPT_KEY + ATTEMPT_CHANGING`."""
    (job, epoch, node, tier, dispatched_ms, started_ms, ended_ms, freed_ms, outcome, rest) = row
    return Attempt(
        job=JobId(job),
        epoch=epoch,
        placement=PlacementId(node=NodeId(node), tier=TierId(tier)),
        dispatched_ms=dispatched_ms,
        started_ms=started_ms,
        ended_ms=ended_ms,
        freed_ms=freed_ms,
        outcome=None if outcome is None else Outcome(outcome),
        **msgspec.structs.asdict(_attempt_body(rest)),
    )


# -- account, events, replays --------------------------------------------------------


def ledger_row(entry: LedgerEntry) -> dict[str, Any]:
    """A ledger line for insert; the table's types keep its integers exact."""
    return {
        "job": entry.job,
        "epoch": entry.epoch,
        "kind": entry.kind.value,
        "segment": entry.segment,
        "lab": entry.lab,
        "user": entry.user,
        "node": entry.placement.node,
        "tier": entry.placement.tier,
        "gpus": entry.gpus,
        "from_ms": entry.from_ms,
        "to_ms": entry.to_ms,
        "mtflops": entry.mtflops,
        "booked_ms": entry.booked_ms,
    }


def ledger_of(row: Row) -> LedgerEntry:
    """A ledger line from all columns of the table."""
    (_id, job, epoch, kind, segment, lab, user, node, tier, gpus, *times) = row
    (from_ms, to_ms, mtflops, booked_ms) = times
    return LedgerEntry(
        job=JobId(job),
        epoch=epoch,
        kind=LedgerKind(kind),
        segment=segment,
        lab=LabId(lab),
        user=UserId(user),
        placement=PlacementId(node=NodeId(node), tier=TierId(tier)),
        gpus=gpus,
        from_ms=from_ms,
        to_ms=to_ms,
        mtflops=mtflops,
        booked_ms=booked_ms,
    )


EVENT = ("id", "at_ms", "name", "job", "epoch", "lab", "user", "node", "actor", "body")


def event_row(event: Event) -> tuple[Any, ...]:
    """Values of `EVENT`; the columns beside `body` are for people who ask in SQL."""
    return (
        event.id,
        event.at_ms,
        event.name.value,
        event.job,
        event.epoch,
        event.lab_id,
        event.user,
        event.node_id,
        event.actor,
        body(event),
    )


FORECAST = Forecast.__struct_fields__
"""A forecast's fields are its columns; job and time of entry are the key."""


def forecast_row(made: Forecast) -> tuple[Any, ...]:
    """A forecast as values for `FORECAST`."""
    return astuple(made)


def forecast_of(row: Row) -> Forecast:
    """A forecast from the columns of `FORECAST`."""
    return Forecast(**dict(zip(FORECAST, row, strict=True)))


def replay_of(row: Row) -> Replay:
    """A replay from all columns of the table."""
    (user, key, fingerprint, created_ms, response) = row
    return Replay(
        user=UserId(user),
        key=key,
        fingerprint=fingerprint,
        created_ms=created_ms,
        response=bytes(response),
    )
