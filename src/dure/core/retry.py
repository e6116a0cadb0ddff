"""Whose fault it was and what comes next: one place for all backends (policy 5)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dure.core.lifecycle import JobEvent, step
from dure.core.model import (
    Attempt,
    Evidence,
    Job,
    JobState,
    OomKind,
    Outcome,
    RetryOn,
    Shape,
    Skip,
    Value,
)
from dure.core.oom import oom_kind
from dure.core.placement import PlacementView, fits, shape_of
from dure.core.policy import Policy


class Context(Value, frozen=True, kw_only=True):
    """What the decision depends on besides the job: the pool and the time."""

    now_ms: int
    placements: tuple[PlacementView, ...]


def judge(evidence: Evidence, *, cancelled: bool) -> Outcome:
    """Name the outcome of a command that ended, from its evidence."""
    if cancelled:
        return Outcome.CANCELLED
    if evidence.timed_out:
        return Outcome.TIMED_OUT
    if evidence.exit_code == 0 and evidence.signal is None:
        return Outcome.COMPLETED
    kind = oom_kind(evidence)
    if kind is OomKind.GPU:
        return Outcome.GPU_OOM
    return Outcome.HOST_OOM if kind is OomKind.HOST else Outcome.ERROR


def conclude(job: Job, attempt: Attempt, outcome: Outcome, ctx: Context, policy: Policy) -> Job:
    """Return the job after an attempt ended with `outcome` (policy 5's table)."""
    evidence = attempt.evidence or Evidence()
    job = msgspec.structs.replace(
        job, exit_code=evidence.exit_code, reservation=None, cancel_ms=job.cancel_ms
    )
    match outcome:
        case Outcome.CANCELLED:
            return _end(job, JobEvent.CANCELLED, ctx)
        case Outcome.COMPLETED:
            return _end(job, JobEvent.COMPLETED, ctx)
        case Outcome.TIMED_OUT:
            return _end(job, JobEvent.TIMED_OUT, ctx, "TIME_LIMIT")
        case Outcome.GPU_OOM:
            return _gpu_oom(job, attempt, ctx, policy)
        case Outcome.HOST_OOM:
            return _host_oom(job, attempt, ctx, policy)
        case Outcome.NODE_LOST:
            return _node_lost(job, attempt, ctx, policy)
        case Outcome.LEASE_EXPIRED:
            return _counted(job, ctx, policy, "LEASE_EXPIRED")
        case Outcome.LAUNCH_REFUSED:
            return _refused(job, attempt, ctx, policy)
        case Outcome.DRAINED:
            return _requeue(job, ctx)
        case Outcome.ERROR:
            if job.request.retry.on is RetryOn.ERROR:
                return _counted(job, ctx, policy, "EXIT_NONZERO")
            return _end(job, JobEvent.FAILED, ctx, "EXIT_NONZERO")


def started(job: Job, at_ms: int) -> Job:
    """The process of the current attempt has started."""
    return msgspec.structs.replace(
        job,
        state=step(job.state, JobEvent.STARTED),
        starts=job.starts + 1,
        refusals=0,
        started_ms=at_ms,
    )


def waited(job: Job, now_ms: int, policy: Policy) -> Job:
    """The job after a wait for a node is over, its full half hours counted (policy 5)."""
    since = job.node_wait_since_ms
    steps = max(0, now_ms - since) // round(policy.node_wait_step_s * 1000) if since else 0
    return msgspec.structs.replace(
        job, node_wait_since_ms=0, node_wait_count=job.node_wait_count + steps
    )


def present(job: Job, ctx: Context) -> bool:
    """Whether some fitting placement is in service (else the job is NODE_WAIT)."""
    shape = shape_of(job, ctx.now_ms)
    return any(v.in_service and fits(shape, v) for v in ctx.placements)


def _end(job: Job, event: JobEvent, ctx: Context, error: str = "", **params: str | float) -> Job:
    return msgspec.structs.replace(
        job,
        state=step(job.state, event),
        ended_ms=ctx.now_ms,
        eligible_ms=0,
        waiting_for="",
        error=error,
        error_params=params,
    )


def _requeue(job: Job, ctx: Context, eligible_ms: int = 0, waiting_for: str = "") -> Job:
    """Back in line with the same `queue_entered_at`; NODE_WAIT when nothing is there."""
    event = JobEvent.REQUEUED if present(job, ctx) else JobEvent.REQUEUED_ABSENT
    state = step(job.state, event)
    return msgspec.structs.replace(
        job,
        state=state,
        eligible_ms=eligible_ms,
        waiting_for=waiting_for,
        node_wait_since_ms=ctx.now_ms if state is JobState.NODE_WAIT else 0,
    )


def _limit(job: Job, policy: Policy) -> int:
    asked = job.request.retry.max
    return policy.max_retries if asked is None else asked


def _counted(job: Job, ctx: Context, policy: Policy, error: str, *, at_once: bool = False) -> Job:
    """Check first, then count: the failure after the last allowed one is DEAD."""
    if job.retries >= _limit(job, policy):
        return _end(job, JobEvent.DIED, ctx, error, retries=job.retries)
    job = msgspec.structs.replace(job, retries=job.retries + 1)
    if at_once:
        return _requeue(job, ctx)
    return _requeue(job, ctx, ctx.now_ms + policy.backoff_ms(job.retries), "RETRY_BACKOFF")


def _gpu_oom(job: Job, attempt: Attempt, ctx: Context, policy: Policy) -> Job:
    if not job.request.oom_escalate:
        return _end(job, JobEvent.FAILED, ctx, "GPU_OOM", tier=attempt.placement.tier)
    larger = larger_tiers(shape_of(job, ctx.now_ms), attempt.vram_gb, ctx.placements)
    if larger:
        raised = msgspec.structs.replace(job, floor_gb=max(job.floor_gb, larger[0]))
        return _counted(raised, ctx, policy, "GPU_OOM", at_once=True)
    free_choice = msgspec.structs.replace(shape_of(job, ctx.now_ms), tiers=(), node=None)
    hint = larger_tiers(free_choice, attempt.vram_gb, ctx.placements)
    names = sorted(
        v.tier.name
        for v in ctx.placements
        if hint and v.tier.vram_gb == hint[0] and fits(free_choice, v)
    )
    params = {"tier": attempt.placement.tier, "hint_tier": names[0] if names else ""}
    return _end(job, JobEvent.FAILED, ctx, "OOM_NO_LARGER_TIER", **params)


def larger_tiers(
    shape: Shape, failed_vram_gb: float, placements: Sequence[PlacementView]
) -> list[float]:
    """VRAM sizes above the failed tier's that a placement of this shape has, smallest first.

    An offline placement counts: the job waits for it.
    """
    sizes = {
        v.tier.vram_gb for v in placements if v.tier.vram_gb > failed_vram_gb and fits(shape, v)
    }
    return sorted(sizes)


def _host_oom(job: Job, attempt: Attempt, ctx: Context, policy: Policy) -> Job:
    had = next((v for v in ctx.placements if v.id == attempt.placement), None)
    mib = had.host_mib_per_gpu * len(attempt.gpus) if had else job.host_mib
    raised = msgspec.structs.replace(job, host_mib=max(job.host_mib, mib))
    shape = shape_of(raised, ctx.now_ms)
    if mib <= 0 or not any(fits(shape, v) for v in ctx.placements):
        return _end(job, JobEvent.FAILED, ctx, "HOST_OOM", memory_mib=mib)
    return _counted(raised, ctx, policy, "HOST_OOM", at_once=True)


def _node_lost(job: Job, attempt: Attempt, ctx: Context, policy: Policy) -> Job:
    """Not counted, unless the loss without `bye` came so soon that the job is suspect."""
    started_ms = attempt.started_ms
    suspect = (
        started_ms is not None
        and attempt.detail != "bye"
        and ctx.now_ms - started_ms <= policy.poison_window_s * 1000
    )
    if suspect:
        job = msgspec.structs.replace(job, node_lost_count=job.node_lost_count + 1)
        if job.node_lost_count >= policy.poison_losses:
            count = job.node_lost_count
            return _end(job, JobEvent.DIED, ctx, "POISON_SUSPECTED", losses=count)
    return _requeue(job, ctx)


def _refused(job: Job, attempt: Attempt, ctx: Context, policy: Policy) -> Job:
    """Not counted; the placement is skipped for a while, five in a row are a failure."""
    refusals = job.refusals + 1
    if refusals >= policy.max_launch_refusals:
        failed = msgspec.structs.replace(job, refusals=refusals)
        return _end(failed, JobEvent.FAILED, ctx, "LAUNCH_FAILED", reason=attempt.detail)
    until = ctx.now_ms + round(policy.launch_skip_s * 1000)
    kept = tuple(
        s for s in job.skips if s.until_ms > ctx.now_ms and s.placement != attempt.placement
    )
    skips = (*kept, Skip(placement=attempt.placement, until_ms=until))
    return _requeue(msgspec.structs.replace(job, refusals=refusals, skips=skips), ctx)
