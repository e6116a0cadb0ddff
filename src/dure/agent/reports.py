"""From what the local backend sees to what the queue is told."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from dure.adapters.compute.edge.payload import INLINE_BYTES, encode_result
from dure.agent.journal import Entry, Journal
from dure.core.lease import Commit, End, Report
from dure.core.model import NodeHealth
from dure.ports import (
    Clock,
    ComputeBackend,
    Exited,
    Freed,
    LeaseExpired,
    LeaseKey,
    LeaseQueue,
    Observation,
    Started,
)

log = logging.getLogger("dure.agent")


class Outbox:
    """Forwards observations; the local cursor moves only when the queue has answered."""

    def __init__(
        self, queue: LeaseQueue, local: ComputeBackend, journal: Journal, clock: Clock
    ) -> None:
        self._queue = queue
        self._local = local
        self._journal = journal
        self._clock = clock
        self._cursor = 0

    def forward(self) -> bool:
        """Tell the queue what is new; True when a beat should follow at once."""
        seen, cursor = self._local.observe(self._cursor)
        reports: dict[LeaseKey, Report] = {}
        started = False
        for observation in seen:
            started |= self._take(observation, reports)
        reports = {key: self._dated(key, report) for key, report in reports.items()}
        answers = self._queue.report(list(reports.values()))
        for (key, report), answer in zip(reports.items(), answers, strict=True):
            self._answered(key, report, answer)
        self._cursor = cursor
        self._local.observe(cursor)  # acknowledges: nothing of it is asked for again
        return started

    def _take(self, seen: Observation, reports: dict[LeaseKey, Report]) -> bool:
        """Add one observation to the reports; True for a start."""
        if not isinstance(seen, Started | Exited | Freed | LeaseExpired):
            return False
        entry = self._journal.get(seen.key)
        if entry is None:
            return False
        if isinstance(seen, Started):
            entry.started_ms = seen.at_ms
            return True
        age_ms = max(0, self._clock.now_ms() - seen.at_ms)
        if isinstance(seen, Freed):
            self._free(entry, age_ms, reports)
        elif not entry.lost:
            reports[seen.key] = self._end(entry, seen, age_ms)
        return False

    def _end(self, entry: Entry, seen: Exited | LeaseExpired, age_ms: int) -> Report:
        if isinstance(seen, LeaseExpired):
            gone = seen.node_state is NodeHealth.OFFLINE
            end = End.GONE if gone else End.BROKEN
            why = "the machine was restarted" if gone else "its supervisor was killed"
            return Report(ticket=entry.ticket, end=end, detail=why)
        tail, size = self._log_tail(seen.key)
        result = encode_result(seen.evidence, tail, size)
        return Report(ticket=entry.ticket, end=End.DONE, result=result, age_ms=age_ms)

    @staticmethod
    def _free(entry: Entry, age_ms: int, reports: dict[LeaseKey, Report]) -> None:
        known = reports.get(entry.key) or Report(ticket=entry.ticket, end=End.FREED)
        reports[entry.key] = msgspec.structs.replace(known, freed_age_ms=age_ms)

    def _dated(self, key: LeaseKey, report: Report) -> Report:
        entry = self._journal.get(key)
        if entry is None or not entry.started_ms:
            return report
        age_ms = max(0, self._clock.now_ms() - entry.started_ms)
        return msgspec.structs.replace(report, started_age_ms=age_ms)

    def _log_tail(self, key: LeaseKey) -> tuple[bytes, int]:
        path = self._local.log_path(key)
        if path is None:
            return b"", 0
        try:
            with Path(path).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - INLINE_BYTES))
                return file.read(INLINE_BYTES), size
        except OSError:
            return b"", 0

    def _answered(self, key: LeaseKey, report: Report, answer: Commit) -> None:
        """Note what the queue has; a refused result is said once, in the journal of the unit."""
        entry = self._journal.get(key)
        if entry is None:
            return
        job = report.ticket.job
        if answer in (Commit.STALE, Commit.GONE) and not entry.lost:
            log.warning("job %d: its end came too late and does not count (%s)", job, answer.value)
        elif report.end is End.DONE and not entry.ended:
            log.info("job %d: end reported (%s)", job, answer.value)
        entry.ended = entry.ended or report.end is not End.FREED
        if report.freed_age_ms is not None:
            self._journal.strike(key)
