"""The lease queue inside one process: the fake that ships.

It passes the same contract, chaos and comparison suites as the one over Redis: whatever a
script does there is one method here, under one lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec

from dure.adapters.lease.board import LIVE, Board, Entry, S
from dure.core.lease import (
    BeatReply,
    Bye,
    Changes,
    Claim,
    Commit,
    Enqueued,
    Expired,
    LeaseBeat,
    NodeMark,
    NodeReport,
    NodeView,
    NodeViews,
    Projection,
    Report,
    SweepRule,
    Swept,
    Task,
    Ticket,
)
from dure.core.model import JobId, NodeHealth, NodeId
from dure.ports import Clock, LeaseKey, StopOrder


class MemoryLeaseQueue:
    """`LeaseQueue` in this process. `restart` is what a restart of Redis does to it."""

    def __init__(self, clock: Clock, *, ttl_s: float = 90.0) -> None:
        self._clock = clock
        self._rung = threading.Condition()
        self._board = Board(round(ttl_s * 1000), self._ring)
        self._nodes: dict[NodeId, NodeView] = {}
        self._dead: set[NodeId] = set()
        self._doors: set[str] = set()
        self._run = 1

    @property
    def stale(self) -> dict[tuple[JobId, int], bytes]:
        """Results of leases that were not in force, kept as evidence."""
        return self._board.stale

    def restart(self, *, lose_beats: bool = True) -> None:
        """Another run id, and what had a time to live is gone."""
        with self._rung:
            self._run += 1
            if lose_beats:
                self._board.lines.beats.clear()

    # -- control plane --

    def enqueue(self, tasks: Sequence[Task]) -> list[Enqueued]:
        """Put dispatches into the line."""
        with self._rung:
            return [self._board.enqueue(task, self._clock.now_ms()) for task in tasks]

    def cancel(self, orders: Sequence[StopOrder]) -> None:
        """Ask for stops."""
        with self._rung:
            for order in orders:
                self._board.cancel(order, self._clock.now_ms())

    def fence(self, keys: Sequence[LeaseKey]) -> None:
        """Make these epochs worth nothing, for ever."""
        with self._rung:
            for key in keys:
                self._board.fence(key)

    def sweep(self, rule: SweepRule) -> Swept:
        """Expire what nobody keeps alive."""
        with self._rung:
            now = self._clock.now_ms()
            run_id = f"memory-{self._run}"
            jumped = rule.expected_ms and abs(now - rule.expected_ms) > rule.jump_ms
            if rule.run_id != run_id or jumped:
                return Swept(run_id=run_id, now_ms=now)
            live = [self._board.tasks[job] for job in list(self._board.lines.dispatched)]
            due = [e for e in live if self._is_due(e, now, rule.ack_ms)]
            braked = 0
            if rule.brake and len(due) >= 3 and len(due) * 2 >= len(live):
                braked, due = len(due), []
            waiting = [self._board.tasks[job] for job in self._board.lines.pending]
            due += [e for e in waiting if self._unclaimed(e, now, rule.ack_ms)]
            expired = tuple(self._expire(entry, now) for entry in due)
            return Swept(run_id=run_id, now_ms=now, expired=expired, braked=braked)

    def _state(self, node: NodeId) -> NodeHealth:
        view = self._nodes.get(node)
        return (view.state if view else None) or NodeHealth.SUSPECTED

    def _is_due(self, entry: Entry, now: int, ack_ms: int) -> bool:
        state = self._state(entry.node)
        silent = self._board.lines.beats.get(entry.job, 0) <= now
        unheard = not entry.acked and now - entry.dispatched_ms >= ack_ms
        dead = entry.idempotent and state is NodeHealth.OFFLINE and entry.node in self._dead
        return (silent or unheard or dead) and state is not NodeHealth.SUSPECTED

    def _unclaimed(self, entry: Entry, now: int, ack_ms: int) -> bool:
        late = now - entry.queued_ms >= ack_ms
        return late and self._state(entry.node) is not NodeHealth.SUSPECTED

    def _expire(self, entry: Entry, now: int) -> Expired:
        state = self._state(entry.node)
        if entry.status is S.PENDING:
            entry.freed_ms = now
        self._board.lose(entry, now, state)
        epoch = entry.issued
        return Expired(job=entry.job, epoch=epoch, node=entry.node, state=state)

    def changes(self, after: int, limit: int = 1000) -> Changes:
        """What changed after a cursor."""
        with self._rung:
            self._doors.discard("")
            found = sorted(
                (seq, job) for job, seq in self._board.lines.changed.items() if seq > after
            )
            found = found[:limit]
            return Changes(
                now_ms=self._clock.now_ms(),
                cursor=found[-1][0] if found else after,
                tasks=tuple(
                    self._board.tasks[job].view()
                    for _, job in found
                    if self._board.tasks[job].issued
                ),
            )

    def settle(self, keys: Sequence[LeaseKey]) -> None:
        """Forget leases whose ends are recorded."""
        with self._rung:
            for key in keys:
                entry = self._board.tasks.get(key.job)
                if entry is not None and entry.issued == key.epoch and entry.freed_ms:
                    self._board.lines.changed.pop(key.job, None)

    def project(self, tasks: Sequence[Projection]) -> None:
        """Show what the store decided."""
        with self._rung:
            for task in tasks:
                self._board.project(task)

    def requeue(self, jobs: Sequence[JobId]) -> None:
        """Forget counts after a retry by hand."""
        with self._rung:
            for job in jobs:
                self._board.requeue(job, self._clock.now_ms())

    def nodes(self) -> NodeViews:
        """All nodes that have ever sent a beat."""
        with self._rung:
            found = tuple(v for _, v in sorted(self._nodes.items()) if v.last_seen_ms)
            return NodeViews(now_ms=self._clock.now_ms(), nodes=found)

    def mark(self, marks: Sequence[NodeMark]) -> None:
        """Write verdicts on nodes."""
        with self._rung:
            for mark in marks:
                self._nodes[mark.node] = msgspec.structs.replace(
                    self._node(mark.node),
                    state=mark.state,
                    ready=mark.ready,
                    penalty=mark.penalty,
                    penalty_until_ms=mark.penalty_until_ms,
                )
                (self._dead.add if mark.dead else self._dead.discard)(mark.node)

    def forget(self, node: NodeId) -> None:
        """A node that an administrator has removed."""
        with self._rung:
            self._nodes.pop(node, None)

    def connected(self) -> frozenset[NodeId] | None:
        """There are no connections here."""
        return None

    def news(self, timeout_s: float) -> bool:
        """Wait for a change."""
        return self._wait("", timeout_s)

    # -- agent --

    def claim(self, node: NodeId, lease_ids: Sequence[str]) -> list[Claim]:
        """Take tasks for a node."""
        with self._rung:
            mine = [self._board.tasks[job] for job in self._board.lines.pending]
            mine = [entry for entry in mine if entry.node == node]
            return [
                self._claim(entry, lease_id, self._clock.now_ms())
                for entry, lease_id in zip(mine, lease_ids, strict=False)
            ]

    def _claim(self, entry: Entry, lease_id: str, now: int) -> Claim:
        view = self._node(entry.node)
        free = view.report.free_vram_mib - entry.need_mib
        report = msgspec.structs.replace(view.report, free_vram_mib=free)
        self._nodes[entry.node] = msgspec.structs.replace(view, report=report)
        return self._board.claim(entry, lease_id, now)

    def beat(self, report: NodeReport, leases: Sequence[LeaseBeat]) -> BeatReply:
        """Keep a node and its leases alive."""
        with self._rung:
            now = self._clock.now_ms()
            old = self._nodes.get(report.node)
            fresh = old is None or not old.last_seen_ms or old.report.sample != report.sample
            view = self._node(report.node)
            self._nodes[report.node] = msgspec.structs.replace(
                view,
                report=report,
                last_seen_ms=now,
                last_sample_ms=now if fresh else view.last_sample_ms,
                bye=None,
                bye_ms=0,
            )
            verdicts = tuple(self._board.beat(report.node, lease, now) for lease in leases)
            return BeatReply(verdicts=verdicts, state=view.state)

    def report(self, reports: Sequence[Report]) -> list[Commit]:
        """Commit results, failures and freed GPUs."""
        with self._rung:
            return [self._board.report(report, self._clock.now_ms()) for report in reports]

    def bye(self, node: NodeId, kind: Bye, leases: Sequence[Ticket]) -> None:
        """Leave in order."""
        with self._rung:
            now = self._clock.now_ms()
            view = self._node(node)
            state = NodeHealth.OFFLINE if kind is Bye.OFF else view.state
            self._nodes[node] = msgspec.structs.replace(view, bye=kind, bye_ms=now, state=state)
            for ticket in leases:
                entry = self._board.tasks.get(ticket.job)
                if entry is None or entry.status not in LIVE or not entry.holds(ticket):
                    continue
                if kind is Bye.OFF:
                    self._board.lose(entry, now, NodeHealth.OFFLINE, returned=True)
                else:
                    self._board.keep(entry, now)
            self._ring("")

    def doorbell(self, node: NodeId, timeout_s: float) -> bool:
        """Wait until somebody rings for this node."""
        return self._wait(node, timeout_s)

    def close(self) -> None:
        """Wake whoever waits."""
        with self._rung:
            self._rung.notify_all()

    # -- inside --

    def _node(self, node: NodeId) -> NodeView:
        return self._nodes.get(node) or NodeView(report=NodeReport(node=node))

    def _ring(self, door: str) -> None:
        self._doors.add(door)
        self._rung.notify_all()

    def _wait(self, door: str, timeout_s: float) -> bool:
        """Doors are real waiting: their time is the machine's, not the clock's."""
        until = time.monotonic() + timeout_s
        with self._rung:
            while door not in self._doors:
                left = until - time.monotonic()
                if left <= 0 or not self._rung.wait(left):
                    return False
            self._doors.discard(door)
            return True
