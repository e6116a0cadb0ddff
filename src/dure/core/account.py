"""What an attempt costs, exactly once (P-6, P-9).

Held GPU-time (claim to seen free) = charged + written off. Ledger lines are append-only
and unique by (job, epoch, kind, segment).
"""

from __future__ import annotations

import msgspec

from dure.core.model import Attempt, Job, LedgerEntry, LedgerKind, Outcome, Value
from dure.core.reservation import Settled, charge_segments

LOST = frozenset({Outcome.NODE_LOST, Outcome.LEASE_EXPIRED})
"""Outcomes whose time after the last sign of life is written off, not charged."""


class Lost(Value, frozen=True, kw_only=True):
    """A job and its lost attempt after what was seen of it has been charged."""

    job: Job
    attempt: Attempt
    entries: tuple[LedgerEntry, ...]


def close(job: Job, attempt: Attempt, freed_ms: int) -> Settled:
    """Charge an attempt whose GPUs were seen free at `freed_ms`.

    Run from process start to seen free, at the rate of the dispatch, with the reservation
    segments that led to it. After a lost lease that was charged already: the rest is
    written off, or, when the attempt came back, charged as a further segment, gap included.
    """
    freed_ms = max(freed_ms, attempt.dispatched_ms)
    if attempt.booked_to_ms is None:
        settled = charge_segments(job, attempt.epoch, attempt.segments, freed_ms)
        lines = (*_start_up(job, attempt, freed_ms), *_run(job, attempt, freed_ms, freed_ms))
        return Settled(job=settled.job, entries=(*lines, *settled.entries))
    lost = attempt.outcome in LOST
    kind = LedgerKind.LOST_TAIL if lost else LedgerKind.RUN
    segment = 0 if lost else attempt.run_segments
    span = (attempt.booked_to_ms, freed_ms)
    return Settled(job=job, entries=_line(job, attempt, kind, span, freed_ms, segment))


def lose(job: Job, attempt: Attempt, now_ms: int) -> Lost:
    """Charge a lost lease when it is declared: run up to the last sign of life.

    One that came back and is lost again is charged on from where it was, gap included.
    """
    if attempt.booked_to_ms is not None:
        return _lose_again(job, attempt, now_ms)
    settled = charge_segments(job, attempt.epoch, attempt.segments, now_ms)
    started = attempt.started_ms
    if started is None:
        until = max(now_ms, attempt.dispatched_ms)
        lines = _start_up(job, attempt, until)
    else:
        seen = attempt.last_seen_ms if attempt.last_seen_ms is not None else started
        until = max(started, min(seen, now_ms))
        lines = (*_start_up(job, attempt, until), *_run(job, attempt, until, now_ms))
    after = msgspec.structs.replace(attempt, booked_to_ms=until, run_segments=1, segments=())
    return Lost(job=settled.job, attempt=after, entries=(*lines, *settled.entries))


def _lose_again(job: Job, attempt: Attempt, now_ms: int) -> Lost:
    from_ms = attempt.booked_to_ms or 0
    until = max(from_ms, min(attempt.last_seen_ms or 0, now_ms))
    segment = attempt.run_segments
    lines = _line(job, attempt, LedgerKind.RUN, (from_ms, until), now_ms, segment)
    after = msgspec.structs.replace(
        attempt, booked_to_ms=until, run_segments=segment + len(lines), segments=()
    )
    return Lost(job=job, attempt=after, entries=lines)


def _start_up(job: Job, attempt: Attempt, until_ms: int) -> tuple[LedgerEntry, ...]:
    started = until_ms if attempt.started_ms is None else attempt.started_ms
    span = (attempt.dispatched_ms, started)
    return _line(job, attempt, LedgerKind.START_UP, span, until_ms, 0)


def _run(job: Job, attempt: Attempt, until_ms: int, booked_ms: int) -> tuple[LedgerEntry, ...]:
    if attempt.started_ms is None:
        return ()
    span = (attempt.started_ms, until_ms)
    return _line(job, attempt, LedgerKind.RUN, span, booked_ms, 0)


def _line(
    job: Job,
    attempt: Attempt,
    kind: LedgerKind,
    span_ms: tuple[int, int],
    booked_ms: int,
    segment: int,
) -> tuple[LedgerEntry, ...]:
    from_ms, to_ms = span_ms
    if to_ms <= from_ms:
        return ()
    return (
        LedgerEntry(
            job=job.id,
            epoch=attempt.epoch,
            kind=kind,
            segment=segment,
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
