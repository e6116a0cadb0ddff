"""Tasks of the in-process queue and every step that moves one of them.

Rule: no lock here; `MemoryLeaseQueue` holds one around each step, as Redis does.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dure.adapters.lease import answers
from dure.core.lease import (
    BeatAnswer,
    Claim,
    Commit,
    End,
    Enqueued,
    LeaseBeat,
    LeaseVerdict,
    Projection,
    Report,
    Task,
    TaskStatus,
    TaskView,
    Ticket,
)
from dure.core.model import JobId, NodeHealth, NodeId
from dure.ports import LeaseKey, StopOrder

S = TaskStatus
LIVE = frozenset({S.DISPATCHED, S.RUNNING})
ENDED = frozenset({S.DONE, S.DEAD, S.CANCELLED})


class Entry(msgspec.Struct, kw_only=True):
    """One task's hash."""

    job: JobId
    status: TaskStatus = S.CANCELLED
    epoch: int = 0
    issued: int = 0
    fenced: int = 0
    lease_id: str = ""
    node: NodeId = NodeId("")
    payload: bytes = b""
    need_mib: int = 0
    idempotent: bool = False
    order: int = 0
    queued_ms: int = 0
    dispatched_ms: int = 0
    acked: bool = False
    started_ms: int = 0
    seen_ms: int = 0
    expired_ms: int = 0
    expired_state: NodeHealth = NodeHealth.STABLE
    returned: bool = False
    resumed_ms: int = 0
    done_ms: int = 0
    freed_ms: int = 0
    cancel: LeaseVerdict | None = None
    detail: str = ""
    result: bytes = b""
    digest: str = ""
    retries: int = 0

    def holds(self, ticket: Ticket) -> bool:
        """Whether a ticket is the lease in force."""
        same = self.epoch == ticket.epoch and self.lease_id == ticket.lease_id != ""
        return same and self.fenced < ticket.epoch

    def view(self) -> TaskView:
        """What `changes` tells of it."""
        return TaskView(
            job=self.job,
            epoch=self.issued,
            status=self.status,
            node=self.node,
            started_ms=self.started_ms,
            seen_ms=self.seen_ms,
            expired_ms=self.expired_ms,
            expired_state=self.expired_state,
            returned=self.returned,
            resumed_ms=self.resumed_ms,
            done_ms=self.done_ms,
            freed_ms=self.freed_ms,
            detail=self.detail,
            result=self.result,
        )


class Lines:
    """Where tasks stand, and when their beats run out."""

    def __init__(self) -> None:
        self.pending: list[JobId] = []
        self.dispatched: dict[JobId, None] = {}
        self.delayed: dict[JobId, int] = {}
        self.parked: dict[JobId, NodeId] = {}
        self.beats: dict[JobId, int] = {}
        self.changed: dict[JobId, int] = {}

    def leave(self, job: JobId) -> None:
        """Out of every line."""
        if job in self.pending:
            self.pending.remove(job)
        for line in (self.dispatched, self.delayed, self.parked, self.beats):
            line.pop(job, None)


class Board:
    """All tasks, by job; `ring` is called with a node's name, or empty for the control plane."""

    def __init__(self, ttl_ms: int, ring: Callable[[str], None]) -> None:
        self.tasks: dict[JobId, Entry] = {}
        self.lines = Lines()
        self.stale: dict[tuple[JobId, int], bytes] = {}
        self._ttl_ms = ttl_ms
        self._ring = ring
        self._seq = 0

    def enqueue(self, task: Task, now: int) -> Enqueued:
        """Put a dispatch into the line."""
        old = self.tasks.get(task.job)
        if old is not None:
            if old.fenced >= task.epoch:
                return Enqueued.FENCED
            if old.issued >= task.epoch:
                return Enqueued.KNOWN if old.issued == task.epoch else Enqueued.STALE
        self.lines.leave(task.job)
        self._seq += 1
        self.tasks[task.job] = Entry(
            job=task.job,
            status=S.PENDING,
            epoch=task.epoch - 1,
            issued=task.epoch,
            fenced=old.fenced if old else 0,
            node=task.node,
            payload=task.payload,
            need_mib=task.need_vram_mib,
            idempotent=task.idempotent,
            order=(old.order if old else 0) or self._seq,
            queued_ms=now,
            retries=old.retries if old else 0,
        )
        self.lines.pending.append(task.job)
        self.changed(task.job)
        self._ring(task.node)
        return Enqueued.QUEUED

    def cancel(self, order: StopOrder, now: int) -> None:
        """Ask for a stop; what nobody has claimed ends here."""
        entry = self.tasks.get(order.key.job)
        if entry is None or not entry.issued == order.key.epoch > entry.fenced:
            return
        if entry.status is S.PENDING:
            self.lines.leave(entry.job)
            entry.status = S.CANCELLED
            entry.done_ms = entry.freed_ms = now
            entry.detail = "stopped before it started"
            self.changed(entry.job)
        elif entry.status not in ENDED and entry.cancel is None:
            entry.cancel = LeaseVerdict(
                answer=BeatAnswer.CANCEL, stop=order.kind.value, kill_after_s=order.kill_after_s
            )
            self._ring(entry.node)

    def lose(self, entry: Entry, now: int, state: NodeHealth, *, returned: bool = False) -> None:
        """Take a lease away; the state of its node decides where it waits."""
        self.lines.leave(entry.job)
        gone = state is NodeHealth.OFFLINE
        entry.status = S.NODE_WAIT if gone else S.FAILED
        entry.expired_ms, entry.expired_state, entry.returned = now, state, returned
        if gone:
            self.lines.parked[entry.job] = entry.node
        self.changed(entry.job)

    def claim(self, entry: Entry, lease_id: str, now: int) -> Claim:
        """Give a task out."""
        self.lines.leave(entry.job)
        entry.epoch, entry.lease_id, entry.status = entry.issued, lease_id, S.DISPATCHED
        entry.dispatched_ms = entry.seen_ms = now
        self.keep(entry, now)
        ticket = Ticket(job=entry.job, epoch=entry.epoch, lease_id=lease_id)
        return Claim(ticket=ticket, payload=entry.payload)

    def keep(self, entry: Entry, now: int) -> None:
        """Its beat counts from now."""
        self.lines.dispatched[entry.job] = None
        self.lines.beats[entry.job] = now + self._ttl_ms

    def beat(self, node: NodeId, beat: LeaseBeat, now: int) -> LeaseVerdict:
        """One lease of a beat."""
        ticket = beat.ticket
        entry = self.tasks.get(ticket.job)
        if entry is None:
            return LeaseVerdict(answer=BeatAnswer.LOST)
        mine = entry.issued == ticket.epoch > entry.fenced and entry.node == node
        adopted = entry.status is S.PENDING and mine
        if not (adopted or entry.holds(ticket)):
            return LeaseVerdict(answer=BeatAnswer.LOST)
        verdict = entry.cancel or LeaseVerdict(answer=BeatAnswer.OK)
        if entry.status not in LIVE:
            if entry.cancel is not None or not (adopted or entry.status is S.NODE_WAIT):
                return LeaseVerdict(answer=BeatAnswer.LOST)
            verdict = LeaseVerdict(answer=BeatAnswer.RESUMED)
            self.resume(entry, ticket, now, adopted=adopted)
        self.keep(entry, now)
        entry.seen_ms, entry.acked = now, True
        if beat.started_age_ms is not None and entry.status is not S.RUNNING:
            entry.started_ms = entry.started_ms or now - beat.started_age_ms
            entry.status = S.RUNNING
            self.changed(entry.job)
        return verdict

    def resume(self, entry: Entry, ticket: Ticket, now: int, *, adopted: bool) -> None:
        """The same lease goes on."""
        self.lines.leave(entry.job)
        entry.status = S.DISPATCHED
        if adopted:
            entry.epoch, entry.lease_id, entry.dispatched_ms = ticket.epoch, ticket.lease_id, now
        else:
            entry.resumed_ms = now
        self.changed(entry.job)

    def report(self, report: Report, now: int) -> Commit:
        """The end of a lease by its holder's word."""
        ticket, done = report.ticket, report.end is End.DONE
        entry = self.tasks.get(ticket.job)
        if entry is None:
            return Commit.GONE
        if not entry.holds(ticket):
            if done:
                self.stale[ticket.job, ticket.epoch] = report.result
            return Commit.STALE
        if report.started_age_ms is not None:
            entry.started_ms = entry.started_ms or now - report.started_age_ms
        freshly = report.freed_age_ms is not None and not entry.freed_ms
        if report.freed_age_ms is not None and freshly:
            entry.freed_ms = now - report.freed_age_ms
        if entry.status in ENDED:
            if freshly:
                self.changed(entry.job)
            if entry.status is not S.DONE:
                return Commit.TERMINAL
            differs = done and entry.digest != answers.digest(report.result)
            return Commit.DIFFERS if differs else Commit.DUP
        live = entry.status in LIVE
        if done:
            self.lines.leave(entry.job)
            entry.status, entry.result = S.DONE, report.result
            entry.done_ms, entry.digest = now - report.age_ms, answers.digest(report.result)
        elif live and report.end is not End.FREED:
            gone = report.end is End.GONE
            self.lose(entry, now, NodeHealth.OFFLINE if gone else NodeHealth.STABLE)
            entry.detail = report.detail
        elif live:
            return Commit.OK
        elif not freshly:
            return Commit.DUP
        self.changed(entry.job)
        return Commit.OK

    def changed(self, job: JobId) -> None:
        """Tell the control plane."""
        self._seq += 1
        self.lines.changed[job] = self._seq
        self._ring("")

    def fence(self, key: LeaseKey) -> None:
        """Make an epoch worth nothing, for ever."""
        entry = self.tasks.setdefault(key.job, Entry(job=key.job))
        entry.fenced = max(entry.fenced, key.epoch)
        if entry.issued > key.epoch:
            return
        self.lines.leave(key.job)
        self.lines.changed.pop(key.job, None)
        entry.epoch = max(entry.epoch, key.epoch)
        entry.lease_id = ""
        if entry.status not in (S.DONE, S.DEAD):
            entry.status = S.CANCELLED
        if entry.node:
            self._ring(entry.node)

    def project(self, task: Projection) -> None:
        """Show what the store decided after a loss."""
        entry = self.tasks.get(task.job)
        waits = entry is not None and entry.status in (S.NODE_WAIT, S.FAILED)
        if entry is None or not waits or entry.issued != task.epoch:
            return
        self.lines.leave(task.job)
        entry.status, entry.retries = task.status, task.retries
        if task.status is S.FAILED:
            self.lines.delayed[task.job] = task.due_ms
        elif task.status is S.NODE_WAIT:
            self.lines.parked[task.job] = entry.node

    def requeue(self, job: JobId, now: int) -> None:
        """A retry by hand."""
        entry = self.tasks.get(job)
        if entry is not None and entry.status in (S.DEAD, S.FAILED, S.NODE_WAIT):
            self.lines.leave(job)
            entry.status, entry.retries, entry.cancel = S.FAILED, 0, None
            self.lines.delayed[job] = now
