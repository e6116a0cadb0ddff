"""What users do with jobs: submit, cancel, hold, release, retry, rerun, edit, reorder.

Each is one transaction; what may run is stopped after the commit, and again by the
reconciler if the process died between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from dure.core.errors import DureError, ErrorCode
from dure.core.events import EventName
from dure.core.lifecycle import JobEvent, step
from dure.core.maintenance import Action
from dure.core.model import (
    ACTIVE,
    PROMOTED_WAIT,
    RETRYABLE,
    TERMINAL,
    WAITING,
    Attempt,
    Job,
    JobId,
    JobRequest,
    JobState,
    Lab,
    Role,
    Shape,
    User,
)
from dure.core.placement import fits, no_fit, shape_of
from dure.core.reservation import settle
from dure.core.retry import waited
from dure.engine.engine import Engine, owned
from dure.engine.faultpoints import reached
from dure.engine.work import Work
from dure.ports import LeaseKey, Replay, StopKind

_POSITION_STEP = 1024.0


class Submitted(msgspec.Struct, frozen=True):
    """The jobs of a submit; `replayed` when its Idempotency-Key was used before."""

    jobs: tuple[Job, ...]
    replayed: bool = False


def submit(
    engine: Engine,
    actor: User,
    requests: Sequence[JobRequest],
    *,
    hold: bool = False,
    key: str = "",
) -> Submitted:
    """Accept jobs into the actor's personal queue and promote what has a slot.

    The same `key` with the same requests gives the same jobs for a day.
    Errors: INVALID_REQUEST, FORBIDDEN, GPU_LIMIT, TIME_LIMIT_TOO_LONG, QUEUE_LIMIT,
    NO_FIT_PLACEMENT, IDEMPOTENCY_MISMATCH, SERVICE_MAINTENANCE.
    """
    fingerprint = hashlib.sha256(msgspec.json.encode([requests, hold])).hexdigest()
    with engine.change("submit", actor.name) as work:
        if key:
            replayed = _replayed(work, actor, key, fingerprint)
            if replayed is not None:
                return Submitted(replayed, replayed=True)
        engine.gate(Action.WORK)
        jobs = _accept(engine, work, actor, requests, hold=hold)
        if key:
            ids = msgspec.json.encode([j.id for j in jobs])
            work.tx.put_replay(
                Replay(
                    user=actor.name,
                    key=key,
                    fingerprint=fingerprint,
                    created_ms=work.now_ms,
                    response=ids,
                )
            )
        work.promote([actor.name])
        done = tuple(work.job(j.id) or j for j in jobs)
    return Submitted(done)


def _replayed(work: Work, actor: User, key: str, fingerprint: str) -> tuple[Job, ...] | None:
    replay = work.tx.replay(actor.name, key)
    if replay is None:
        return None
    if replay.fingerprint != fingerprint:
        raise DureError(ErrorCode.IDEMPOTENCY_MISMATCH, key=key)
    ids = msgspec.json.decode(replay.response, type=list[int])
    return tuple(j for i in ids if (j := work.job(JobId(i))) is not None)


def _accept(
    engine: Engine, work: Work, actor: User, requests: Sequence[JobRequest], *, hold: bool
) -> list[Job]:
    queue = work.tx.personal_queue(actor.name)
    waiting = work.tx.waiting_count(actor.name)
    position = queue[-1].position if queue else 0.0
    jobs: list[Job] = []
    for asked in requests:
        request = _with_default_limit(engine, asked)
        lab = work.tx.lab(request.lab)
        check_request(engine, work, actor, lab, request)
        limit = narrowest(
            engine.policy.waiting_per_user,
            lab.limits.waiting if lab else None,
            actor.limits.waiting,
        )
        if waiting + len(jobs) >= limit:
            raise DureError(ErrorCode.QUEUE_LIMIT, limit=limit)
        job_id = work.tx.next_job_id()
        # Behind promoted jobs too: a hold may bring them back to this queue.
        position = max(position + _POSITION_STEP, job_id * _POSITION_STEP)
        jobs.append(
            Job(
                id=job_id,
                user=actor.name,
                request=request,
                state=JobState.PERSONAL_QUEUE_WAIT,
                submitted_ms=work.now_ms,
                position=position,
                held=hold,
            )
        )
    work.tx.add_jobs(jobs)
    for job in jobs:
        work.adopt(job)
        work.tell(job, EventName.JOB_SUBMITTED)
    return jobs


def _with_default_limit(engine: Engine, request: JobRequest) -> JobRequest:
    default = engine.policy.default_time_limit_s
    if request.time_limit_s is None and default:
        return msgspec.structs.replace(request, time_limit_s=default)
    return request


def narrowest(default: int, *limits: int | None) -> int:
    """The smallest of the limits that are set (policy 9)."""
    return min([default, *(limit for limit in limits if limit is not None)])


def check_request(
    engine: Engine, work: Work, actor: User, lab: Lab | None, request: JobRequest
) -> None:
    """Raise what is wrong with a request: lab, limits, fit. Nothing is changed."""
    if lab is None:
        raise DureError(ErrorCode.NOT_FOUND, kind="lab", id=request.lab)
    if actor.role is not Role.ADMIN and request.lab != actor.lab:
        raise DureError(ErrorCode.FORBIDDEN, action="submit_for_lab", id=request.lab)
    policy = engine.policy
    gpus = narrowest(policy.max_gpus_per_job, lab.limits.num_gpus, actor.limits.num_gpus)
    if request.num_gpus > gpus:
        raise DureError(ErrorCode.GPU_LIMIT, limit=gpus, asked=request.num_gpus)
    longest = narrowest(
        policy.max_time_limit_s or 1 << 62,
        lab.limits.max_time_limit_s,
        actor.limits.max_time_limit_s,
    )
    if longest < 1 << 62 and (request.time_limit_s or 1 << 62) > longest:
        raise DureError(ErrorCode.TIME_LIMIT_TOO_LONG, limit_s=longest)
    check_fit(work, request_shape(request))
    check_workdir(engine, work, actor, request)


@runtime_checkable
class _JudgesWorkdir(Protocol):
    def workdir_refusal(self, workdir: str, unix_uid: int) -> str: ...


def check_workdir(engine: Engine, work: Work, actor: User, request: JobRequest) -> None:
    """Raise INVALID_REQUEST when every machine that fits says that it cannot start there.

    A backend that cannot say so now may still refuse the launch.
    """
    if not request.workdir:
        return
    shape = request_shape(request)
    views = [v for v in work.context.placements if fits(shape, v)]
    backends = {b.name: b for v in views if (b := engine.backend_of(v.id.node)) is not None}
    said = ""
    for backend in backends.values():
        if not isinstance(backend, _JudgesWorkdir):
            return
        said = backend.workdir_refusal(request.workdir, actor.unix_uid)
        if not said:
            return
    if said:
        raise DureError(ErrorCode.INVALID_REQUEST, field="workdir", problem=said)


def request_shape(request: JobRequest) -> Shape:
    """The shape a fresh job with this request has."""
    return Shape(
        num_gpus=request.num_gpus,
        tiers=tuple(sorted(request.tiers)),
        node=request.node,
        floor_gb=request.min_vram_gb,
    )


def check_fit(work: Work, shape: Shape) -> None:
    """P-3: raise NO_FIT_PLACEMENT when nothing could ever run this shape."""
    views = work.context.placements
    if any(fits(shape, v) for v in views):
        return
    why = no_fit(shape, views)
    raise DureError(
        ErrorCode.NO_FIT_PLACEMENT,
        failed_constraint=why.failed,
        nearest_node=why.nearest.node if why.nearest else None,
        nearest_tier=why.nearest.tier if why.nearest else None,
        nearest_requests=[{**r} for r in why.requests],
        num_gpus=shape.num_gpus,
    )


def cancel(engine: Engine, actor: User, job_id: JobId) -> Job:
    """End a job: at once while it waits, by SIGTERM and a clock while it may run."""
    engine.gate(Action.CANCEL)
    stopped: Attempt | None = None
    with engine.change("cancel", actor.name) as work:
        job = owned(work, actor, job_id)
        if job.state in TERMINAL:
            raise DureError(ErrorCode.ALREADY_ENDED, id=int(job_id), state=job.state.value)
        if job.state in WAITING:
            job = _cancel_waiting(work, job)
        elif job.state in ACTIVE and job.state is not JobState.CANCELLING:
            job, stopped = _cancel_running(work, job)
    if stopped is not None:
        key = LeaseKey(job=stopped.job, epoch=stopped.epoch)
        engine.send_stop(key, stopped.placement.node, StopKind.CANCEL)
        reached("cancel.after_stop")
    return job


def _cancel_waiting(work: Work, job: Job) -> Job:
    """Nothing runs: reservation and left-over segments are charged at once."""
    settled = settle(job, work.now_ms)
    work.book(settled.entries)
    after = msgspec.structs.replace(
        settled.job,
        state=step(job.state, JobEvent.CANCELLED),
        cancel_ms=work.now_ms,
        ended_ms=work.now_ms,
        eligible_ms=0,
    )
    work.put(after, EventName.JOB_CANCELLED)
    work.promote([job.user])
    return after


def _cancel_running(work: Work, job: Job) -> tuple[Job, Attempt]:
    attempt = work.attempt(job.id, job.epoch)
    assert attempt is not None
    after = msgspec.structs.replace(
        job, state=step(job.state, JobEvent.CANCEL_ASKED), cancel_ms=work.now_ms
    )
    stopped = msgspec.structs.replace(attempt, stop=StopKind.CANCEL.value, stop_ms=work.now_ms)
    work.put(after, EventName.JOB_CANCEL_ASKED)
    work.put_attempt(stopped)
    return after, stopped


def hold(engine: Engine, actor: User, job_id: JobId) -> Job:
    """Take a waiting job back to the personal queue; it keeps no slot, no reservation."""
    engine.gate(Action.WORK)
    with engine.change("hold", actor.name) as work:
        job = owned(work, actor, job_id)
        if job.state not in WAITING:
            raise wrong_state(job, "hold")
        if job.held:
            return job
        settled = settle(job, work.now_ms)
        work.book(settled.entries)
        state = job.state
        if state in PROMOTED_WAIT:
            state = step(state, JobEvent.DEMOTED)
        after = msgspec.structs.replace(
            waited(settled.job, work.now_ms, engine.policy),
            state=state,
            held=True,
            entered_ms=0,
            fit_lost=False,
        )
        work.put(after, EventName.JOB_HELD)
        work.promote([job.user])
    return after


def release(engine: Engine, actor: User, job_id: JobId) -> Job:
    """Let a held job take its turn again."""
    engine.gate(Action.WORK)
    with engine.change("release", actor.name) as work:
        job = owned(work, actor, job_id)
        if job.state not in WAITING:
            raise wrong_state(job, "release")
        if not job.held:
            return job
        work.put(msgspec.structs.replace(job, held=False), EventName.JOB_RELEASED)
        work.promote([job.user])
        after = work.job(job_id)
    assert after is not None
    return after


def retry(engine: Engine, actor: User, job_id: JobId) -> Job:
    """The same job again: counters back to zero, epoch, floors and ledger go on."""
    engine.gate(Action.WORK)
    with engine.change("retry", actor.name) as work:
        job = owned(work, actor, job_id)
        if job.state not in RETRYABLE:
            raise wrong_state(job, "retry")
        check_fit(work, shape_of(job, work.now_ms))
        queue = work.tx.personal_queue(job.user)
        after = msgspec.structs.replace(
            job,
            state=step(job.state, JobEvent.RETRIED),
            retries=0,
            refusals=0,
            node_lost_count=0,
            skips=(),
            entered_ms=0,
            eligible_ms=0,
            waiting_for="",
            ended_ms=0,
            cancel_ms=0,
            exit_code=None,
            error="",
            error_params={},
            fit_lost=False,
            lost_reservation=False,
            position=(queue[-1].position if queue else 0.0) + _POSITION_STEP,
        )
        work.put(after, EventName.JOB_RETRIED)
        work.promote([job.user])
        done = work.job(job_id)
    assert done is not None
    return done


def rerun(engine: Engine, actor: User, job_id: JobId, *, key: str = "") -> Submitted:
    """A new job with the same request."""
    with engine.store.read() as tx:
        job = tx.job(job_id)
    if job is None:
        raise DureError(ErrorCode.NOT_FOUND, kind="job", id=int(job_id))
    if actor.role is not Role.ADMIN and job.user != actor.name:
        raise DureError(ErrorCode.FORBIDDEN, action="change_job", id=int(job_id))
    return submit(engine, actor, [job.request], key=key)


def edit(
    engine: Engine, actor: User, job_id: JobId, change: Callable[[JobRequest], JobRequest]
) -> Job:
    """PATCH a waiting job: smaller or equal keeps its place, larger enters anew."""
    engine.gate(Action.WORK)
    with engine.change("edit", actor.name) as work:
        job = owned(work, actor, job_id)
        if job.state not in WAITING:
            raise wrong_state(job, "edit")
        request = _with_default_limit(engine, change(job.request))
        owner = work.tx.user(job.user) or actor
        check_request(engine, work, owner, work.tx.lab(request.lab), request)
        after = msgspec.structs.replace(job, request=request, fit_lost=False)
        check_fit(work, shape_of(after, work.now_ms))
        after = _keep_or_settle(work, after)
        if _larger(request, job.request) and job.state in PROMOTED_WAIT:
            after = msgspec.structs.replace(after, entered_ms=work.now_ms)
        work.put(after, EventName.JOB_EDITED)
        work.promote([job.user])
        done = work.job(job_id)
    assert done is not None
    return done


def _larger(new: JobRequest, old: JobRequest) -> bool:
    return new.num_gpus > old.num_gpus or new.min_vram_gb > old.min_vram_gb


def _keep_or_settle(work: Work, job: Job) -> Job:
    """A reservation stays only if the new request still fits it and needs as much."""
    held = job.reservation
    if held is None:
        return job
    shape = shape_of(job, work.now_ms)
    view = next((v for v in work.context.placements if v.id == held.placement), None)
    needed = max(held.count, work.world.policy.reserve_min_gpus)
    if view is not None and fits(shape, view) and shape.num_gpus >= needed:
        return job
    settled = settle(job, work.now_ms)
    work.book(settled.entries)
    return settled.job


def reorder(engine: Engine, actor: User, ids: Sequence[JobId]) -> list[Job]:
    """Put the named jobs first in the actor's personal queue, in this order."""
    engine.gate(Action.WORK)
    with engine.change("reorder", actor.name) as work:
        queue = {j.id: j for j in work.tx.personal_queue(actor.name)}
        if len(set(ids)) != len(ids):
            raise DureError(ErrorCode.INVALID_REQUEST, field="jobs", problem="repeated")
        for job_id in ids:
            if job_id not in queue:
                raise DureError(ErrorCode.NOT_FOUND, kind="personal_job", id=int(job_id))
        order = [*(queue[i] for i in ids), *(j for i, j in queue.items() if i not in set(ids))]
        for place, job in enumerate(order, 1):
            position = place * _POSITION_STEP
            if job.position != position:
                moved = msgspec.structs.replace(job, position=position)
                work.put(moved, EventName.JOB_REORDERED)
        work.promote([actor.name])
        return [work.job(j.id) or j for j in order]


def wrong_state(job: Job, action: str) -> DureError:
    """409 for an action that the job's state does not allow."""
    return DureError(ErrorCode.WRONG_STATE, id=int(job.id), state=job.state.value, action=action)
