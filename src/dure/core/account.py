"""What an attempt costs, exactly once (P-6, P-9).

Held GPU-time (claim to seen free) = charged + written off. Ledger lines are append-only
and unique by (job, epoch, kind, segment).
"""

from __future__ import annotations

import msgspec

from dure.core.model import Attempt, Job, LedgerEntry, LedgerKind, Outcome
from dure.core.reservation import Settled, charge_segments

_LOST = frozenset({Outcome.NODE_LOST, Outcome.LEASE_EXPIRED})


def close(job: Job, attempt: Attempt, freed_ms: int) -> Settled:
    """Charge an attempt whose GPUs were seen free at `freed_ms`.

    Run from process start to seen free, at the rate of the dispatch; after a lost lease
    only up to the last sign of life, the rest is written off. Reservation segments that
    led to the attempt go with it, unless no process started (policy 3's table: a cancel
    before the start charges left-over segments; anything else carries them along).
    """
    freed_ms = max(freed_ms, attempt.dispatched_ms)
    entries = _start_up(job, attempt, freed_ms) + _run(job, attempt, freed_ms)
    settled = charge_segments(job, attempt.epoch, attempt.segments, freed_ms)
    return Settled(job=settled.job, entries=(*entries, *settled.entries))


def give_back_segments(job: Job, attempt: Attempt) -> Job:
    """The process never started and the job waits on: its segments wait with it."""
    return msgspec.structs.replace(job, segments=(*attempt.segments, *job.segments))


def unstarted(job: Job, attempt: Attempt, freed_ms: int) -> tuple[LedgerEntry, ...]:
    """Write off the launch of an attempt whose process never started."""
    return _start_up(job, attempt, max(freed_ms, attempt.dispatched_ms))


def _start_up(job: Job, attempt: Attempt, freed_ms: int) -> tuple[LedgerEntry, ...]:
    until = freed_ms if attempt.started_ms is None else attempt.started_ms
    return _line(job, attempt, LedgerKind.START_UP, attempt.dispatched_ms, until, freed_ms)


def _run(job: Job, attempt: Attempt, freed_ms: int) -> tuple[LedgerEntry, ...]:
    started = attempt.started_ms
    if started is None:
        return ()
    until = freed_ms
    if attempt.outcome in _LOST:
        seen = attempt.last_seen_ms if attempt.last_seen_ms is not None else started
        until = min(max(seen, started), freed_ms)
    return (
        *_line(job, attempt, LedgerKind.RUN, started, until, freed_ms),
        *_line(job, attempt, LedgerKind.LOST_TAIL, until, freed_ms, freed_ms),
    )


def _line(
    job: Job, attempt: Attempt, kind: LedgerKind, from_ms: int, to_ms: int, booked_ms: int
) -> tuple[LedgerEntry, ...]:
    if to_ms <= from_ms:
        return ()
    return (
        LedgerEntry(
            job=job.id,
            epoch=attempt.epoch,
            kind=kind,
            segment=0,
            lab=attempt.lab,
            user=job.user,
            placement=attempt.placement,
            gpus=len(attempt.gpus),
            from_ms=from_ms,
            to_ms=to_ms,
            mtflops=attempt.mtflops,
            booked_ms=booked_ms,
        ),
    )
