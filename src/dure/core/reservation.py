"""Reservations as values: four columns of the job, plus finished segments (R1 to R5)."""

from __future__ import annotations

import msgspec

from dure.core.model import Job, LedgerEntry, LedgerKind, PlacementId, Reservation, Segment, Value


class Settled(Value, frozen=True, kw_only=True):
    """A job without its reservation, and the ledger lines that charge it."""

    job: Job
    entries: tuple[LedgerEntry, ...]


def take(job: Job, placement: PlacementId, count: int, mtflops: int, now_ms: int) -> Job:
    """Reserve `count` GPUs from now on, at the tier's rate of now."""
    held = Reservation(placement=placement, count=count, since_ms=now_ms, mtflops=mtflops)
    return msgspec.structs.replace(job, reservation=held, lost_reservation=False)


def grow(job: Job, count: int, mtflops: int, now_ms: int) -> Job:
    """Finish the running segment and hold `count` GPUs of the same placement from now."""
    assert job.reservation is not None
    placement = job.reservation.placement
    return take(finish(job, now_ms), placement, count, mtflops, now_ms)


def finish(job: Job, now_ms: int) -> Job:
    """End the reservation; its segment waits for the attempt it leads to (R4)."""
    held = job.reservation
    if held is None:
        return job
    segment = Segment(
        placement=held.placement,
        gpus=held.count,
        from_ms=held.since_ms,
        # A clock that stepped back must not make a negative charge.
        to_ms=max(now_ms, held.since_ms),
        mtflops=held.mtflops,
    )
    return msgspec.structs.replace(job, reservation=None, segments=(*job.segments, segment))


def settle(job: Job, now_ms: int, until_ms: int | None = None) -> Settled:
    """End the reservation and charge all finished segments at once (R3, R5, cancel).

    `until_ms` ends the running segment earlier than now: at the last good report.
    """
    ended = finish(job, now_ms if until_ms is None else until_ms)
    return charge_segments(ended, ended.epoch, ended.segments, now_ms)


def charge_segments(job: Job, epoch: int, segments: tuple[Segment, ...], now_ms: int) -> Settled:
    """Turn segments into ledger lines, numbered over the whole life of the job."""
    entries = tuple(
        LedgerEntry(
            job=job.id,
            epoch=epoch,
            kind=LedgerKind.RESERVED,
            segment=job.next_segment + offset,
            lab=job.lab,
            user=job.user,
            placement=segment.placement,
            gpus=segment.gpus,
            from_ms=segment.from_ms,
            to_ms=segment.to_ms,
            mtflops=segment.mtflops,
            booked_ms=now_ms,
        )
        for offset, segment in enumerate(segments)
    )
    left = tuple(s for s in job.segments if s not in segments)
    after = msgspec.structs.replace(
        job, segments=left, next_segment=job.next_segment + len(entries)
    )
    return Settled(job=after, entries=entries)
