"""Routes of jobs: submit, look, act."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

import msgspec
from msgspec import UNSET, Meta

from dure import wire
from dure.api.limits import Rate
from dure.api.routing import Call, Reply, Routes
from dure.core.errors import DureError, ErrorCode
from dure.core.model import (
    Job,
    JobId,
    JobRequest,
    JobState,
    LabId,
    NodeId,
    PreStopSignal,
    Retry,
    TierId,
    UserId,
)
from dure.engine import commands, preview, queries, waiting
from dure.ports import JobFilter

C = ErrorCode
routes = Routes("jobs")
Limit = Annotated[int, Meta(ge=1, le=200)]
Cursor = Annotated[str, Meta(max_length=200)]
SUBMIT = (
    C.NO_FIT_PLACEMENT,
    C.TIME_LIMIT_TOO_LONG,
    C.GPU_LIMIT,
    C.QUEUE_LIMIT,
    C.FORBIDDEN,
    C.NOT_FOUND,
)
ACT = (C.FORBIDDEN, C.NOT_FOUND, C.WRONG_STATE, C.SERVICE_MAINTENANCE)
SEE = (C.FORBIDDEN, C.NOT_FOUND)


class JobQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which jobs to list; empty filters nothing."""

    state: list[JobState] = []
    user: wire.Code | None = None
    lab: wire.Code | None = None
    name: wire.ShortText = ""
    mine: bool = False
    since_ms: wire.TimeMs = 0
    limit: Limit = 50
    cursor: Cursor | None = None


class PageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page of something."""

    limit: Limit = 100
    cursor: Cursor | None = None


def request_of(call: Call, body: wire.JobIn) -> JobRequest:
    """Take a submit's body as the core's request, with the caller's defaults."""
    signal = body.pre_stop_signal
    if not body.command[0]:
        raise DureError(C.INVALID_REQUEST, field="command/0", problem="is empty")
    return JobRequest(
        name=body.name or default_name(body.command[0]),
        lab=LabId(body.lab or call.actor.lab),
        command=tuple(body.command),
        env=body.env,
        num_gpus=body.num_gpus,
        tiers=tuple(TierId(t) for t in body.tiers),
        min_vram_gb=body.min_vram_gb,
        node=NodeId(body.node) if body.node is not None else None,
        time_limit_s=body.time_limit_s,
        not_before_ms=body.not_before_ms,
        retry=Retry(max=body.retry.max, on=body.retry.on),
        oom_escalate=body.oom_escalate,
        idempotent=body.idempotent,
        pre_stop_signal=(
            PreStopSignal(signal=signal.signal, before_s=signal.before_s) if signal else None
        ),
        workdir=body.workdir,
        labels=body.labels,
    )


def default_name(program: str) -> str:
    """Name a job after its program's file."""
    return (program.rstrip("/").rpartition("/")[2] or program)[:200]


@routes.add(
    "POST",
    "/v1/jobs",
    wire.JobOut,
    status=201,
    rate=Rate.SUBMIT,
    refuses=(
        *SUBMIT,
        C.IDEMPOTENCY_MISMATCH,
        C.IDEMPOTENCY_IN_FLIGHT,
        C.SERVICE_MAINTENANCE,
    ),
    headers=("Idempotency-Key",),
)
def submit_job(call: Call, body: wire.JobIn) -> Reply:
    """Submit a job into the caller's personal queue."""
    key = call.idempotency_key()
    asked = request_of(call, body)
    done = commands.submit(call.engine, call.actor, [asked], hold=body.hold, key=key)
    return _created(call, done)


def _created(call: Call, done: commands.Submitted) -> Reply:
    if not done.jobs:
        raise DureError(C.NOT_FOUND, kind="job", id="of this Idempotency-Key")
    job = done.jobs[0]
    headers = {"location": f"/v1/jobs/{job.id}"}
    if done.replayed:
        headers["idempotency-replayed"] = "true"
    return Reply(_shown(call, job), headers=headers)


def _shown(call: Call, job: Job) -> wire.JobOut:
    return queries.job(call.engine, call.actor, call.lang, job.id)


@routes.add("GET", "/v1/jobs", wire.JobPage, refuses=(C.FORBIDDEN,))
def list_jobs(call: Call, query: JobQuery) -> Reply:
    """List jobs, newest first; a member's list is that of the own lab."""
    wanted = JobFilter(
        states=tuple(query.state),
        user=call.actor.name if query.mine else (UserId(query.user) if query.user else None),
        lab=LabId(query.lab) if query.lab else None,
        name=query.name,
        since_ms=query.since_ms,
        limit=query.limit,
    )
    page = queries.jobs(call.engine, call.actor, call.lang, wanted, query.cursor)
    given = [(f, getattr(query, f)) for f in ("user", "lab", "name", "since_ms", "limit")]
    pairs = [("state", s.value) for s in query.state] + [(k, str(v)) for k, v in given if v]
    if query.mine:
        pairs.append(("mine", "true"))
    return Reply(page, headers=next_link("/v1/jobs", page.next, pairs))


def next_link(path: str, cursor: str | None, pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Say in a Link header where the next page is."""
    if cursor is None:
        return {}
    return {"link": f'<{path}?{urlencode([*pairs, ("cursor", cursor)])}>; rel="next"'}


@routes.add("GET", "/v1/jobs/{job}", wire.JobOut, refuses=SEE)
def show_job(call: Call, job: int) -> Reply:
    """Show one job with charge, rank and output folder."""
    return Reply(queries.job(call.engine, call.actor, call.lang, JobId(job)))


@routes.add("PATCH", "/v1/jobs/{job}", wire.JobOut, refuses=(*SUBMIT, *ACT))
def edit_job(call: Call, job: int, body: wire.JobPatch) -> Reply:
    """Change a waiting job; a larger request enters the line anew."""

    def change(old: JobRequest) -> JobRequest:
        given = {
            f: value for f in body.__struct_fields__ if (value := getattr(body, f)) is not UNSET
        }
        if "tiers" in given:
            given["tiers"] = tuple(given["tiers"])
        if given.get("name") == "":
            given["name"] = default_name(old.command[0])
        return msgspec.structs.replace(old, **given)

    return Reply(_shown(call, commands.edit(call.engine, call.actor, JobId(job), change)))


@routes.add("POST", "/v1/jobs/{job}/cancel", wire.JobOut, refuses=(*SEE, C.ALREADY_ENDED, *ACT[3:]))
def cancel_job(call: Call, job: int) -> Reply:
    """End a job: at once while it waits, with time for a checkpoint while it runs."""
    return Reply(_shown(call, commands.cancel(call.engine, call.actor, JobId(job))))


@routes.add("POST", "/v1/jobs/{job}/hold", wire.JobOut, refuses=ACT)
def hold_job(call: Call, job: int) -> Reply:
    """Take a waiting job back to its owner's personal queue."""
    return Reply(_shown(call, commands.hold(call.engine, call.actor, JobId(job))))


@routes.add("POST", "/v1/jobs/{job}/release", wire.JobOut, refuses=ACT)
def release_job(call: Call, job: int) -> Reply:
    """Let a held job take its turn again."""
    return Reply(_shown(call, commands.release(call.engine, call.actor, JobId(job))))


@routes.add(
    "POST",
    "/v1/jobs/{job}/retry",
    wire.JobOut,
    rate=Rate.SUBMIT,
    refuses=(*ACT, C.NO_FIT_PLACEMENT),
)
def retry_job(call: Call, job: int) -> Reply:
    """Repeat a failed job as the same job."""
    return Reply(_shown(call, commands.retry(call.engine, call.actor, JobId(job))))


@routes.add(
    "POST",
    "/v1/jobs/{job}/rerun",
    wire.JobOut,
    status=201,
    rate=Rate.SUBMIT,
    refuses=(
        *SUBMIT,
        C.IDEMPOTENCY_MISMATCH,
        C.IDEMPOTENCY_IN_FLIGHT,
        C.SERVICE_MAINTENANCE,
    ),
    headers=("Idempotency-Key",),
)
def rerun_job(call: Call, job: int) -> Reply:
    """Submit a new job with the same request."""
    key = call.idempotency_key()
    return _created(call, commands.rerun(call.engine, call.actor, JobId(job), key=key))


@routes.add("GET", "/v1/jobs/{job}/why", wire.WhyOut, refuses=SEE)
def why_job(call: Call, job: int) -> Reply:
    """Say why a job waits, from the planner itself."""
    return Reply(waiting.why(call.engine, call.actor, call.lang, JobId(job)))


@routes.add("GET", "/v1/jobs/{job}/attempts", wire.AttemptList, refuses=SEE)
def list_attempts(call: Call, job: int) -> Reply:
    """List all dispatches of a job."""
    return Reply(queries.attempts(call.engine, call.actor, JobId(job)))


@routes.add("GET", "/v1/jobs/{job}/events", wire.EventPage, refuses=SEE)
def list_events(call: Call, job: int, query: PageQuery) -> Reply:
    """List what happened to a job, in commit order."""
    page = queries.events(call.engine, call.actor, call.lang, JobId(job), query.limit, query.cursor)
    pairs = [("limit", str(query.limit))]
    return Reply(page, headers=next_link(f"/v1/jobs/{job}/events", page.next, pairs))


@routes.add("POST", "/v1/submit/preview", wire.PreviewOut, refuses=SUBMIT)
def preview_job(call: Call, body: wire.JobIn) -> Reply:
    """Say what a submit would do, or refuse what a submit would refuse; changes nothing."""
    asked = request_of(call, body)
    return Reply(preview.preview(call.engine, call.actor, asked, call.lang, hold=body.hold))


@routes.add("GET", "/v1/me/queue", wire.PersonalQueueOut)
def show_my_queue(call: Call) -> Reply:
    """Show the caller's personal queue, in the caller's order."""
    return Reply(queries.personal_queue(call.engine, call.actor, call.lang))


@routes.add(
    "PUT",
    "/v1/me/queue",
    wire.PersonalQueueOut,
    refuses=(C.NOT_FOUND, C.SERVICE_MAINTENANCE),
)
def order_my_queue(call: Call, body: wire.OrderIn) -> Reply:
    """Put the named jobs first in the caller's personal queue."""
    commands.reorder(call.engine, call.actor, [JobId(j) for j in body.jobs])
    return Reply(queries.personal_queue(call.engine, call.actor, call.lang))
