"""The agent: claims leases, runs them through the local backend, and keeps them alive.

The jobs' supervisors do not depend on it: it may be restarted, or lose the queue for
hours, and the jobs go on. Whoever holds no lease any more is stopped; nothing else is.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

import msgspec

from dure.adapters.compute.edge.payload import decode_order
from dure.agent.journal import Entry, Journal
from dure.agent.outputs import SharedRuns
from dure.agent.reading import Gauge, node_report
from dure.agent.reports import Outbox
from dure.core.lease import (
    BeatAnswer,
    Bye,
    Claim,
    End,
    LeaseBeat,
    LeaseVerdict,
    QueueAway,
    Report,
    Ticket,
)
from dure.core.model import NodeHealth, NodeId
from dure.ports import (
    Clock,
    ComputeBackend,
    Ids,
    LaunchOrder,
    LaunchStatus,
    LeaseQueue,
    StopKind,
    StopOrder,
)

log = logging.getLogger("dure.agent")

UNREADABLE = "this agent cannot read the order; update it"
CLAIMS = 4
"""Leases asked for in one call; more tasks are asked for again at once."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's durations in seconds; tests shorten them."""

    beat_s: float = 15.0
    early_beat_s: float = 5.0
    """While the control plane does not see this node as STABLE."""
    door_s: float = 60.0
    retry_s: float = 1.0
    retry_max_s: float = 30.0
    stop_kill_s: float = 30.0


class Agent:
    """One node. `run` is the whole life; `stop` may be called from a signal handler."""

    def __init__(
        self,
        queue: LeaseQueue,
        local: ComputeBackend,
        journal: Journal,
        gauge: Gauge,
        clock: Clock,
        ids: Ids,
        *,
        times: Times | None = None,
        address: str = "",
        shared: SharedRuns | None = None,
    ) -> None:
        self._queue = queue
        self._local = local
        self._journal = journal
        self._gauge = gauge
        self._ids = ids
        self._times = times or Times()
        self._address = address
        self._shared = shared
        self._outbox = Outbox(queue, local, journal, clock)
        self._clock = clock
        (node,) = local.inventory().nodes
        self.name: NodeId = node.name
        self.state: NodeHealth | None = None
        self._wake = threading.Event()
        self._rang = True
        self._beat_at = 0.0
        self._away = False
        self._failures = 0
        self._bye: Bye | None = None
        self._refusals: list[Report] = []
        self._ended = threading.Event()
        local.watch(self._wake.set)

    # -- life --

    def run(self) -> None:
        """Until `stop`: forward what the jobs do, claim when rung, beat when due."""
        self._relaunch()
        door = threading.Thread(target=self._listen, name="dure-door", daemon=True)
        door.start()
        while self._bye is None:
            self._wake.clear()
            wait_s = self._try_turn()
            if self._bye is None:
                self._wake.wait(wait_s)
        self._leave(self._bye)
        self._ended.set()

    def stop(self, kind: Bye) -> None:
        """Say good-bye and end; a second call changes nothing."""
        self._bye = self._bye or kind
        self._wake.set()

    @property
    def away(self) -> bool:
        """Whether the queue cannot be reached."""
        return self._away

    def _relaunch(self) -> None:
        """Leases that were written down, and whose launch a crash may have cut off."""
        held = list(self._journal)
        if held:
            log.info("taking up %d leases of an earlier run", len(held))
        running = {lease.key for lease in self._local.leases()}
        for entry in held:
            order = decode_order(entry.payload)
            if entry.lost:
                self._stop(entry, StopKind.LOST.value, self._times.stop_kill_s)
            elif entry.key in running or entry.ended:
                continue
            elif order is not None:
                self._launch(entry, order)
            else:
                self._journal.strike(entry.key)
                self._refuse(entry.ticket, UNREADABLE)

    def _listen(self) -> None:
        """The doorbell. A broken connection counts as a ring: one may have been lost."""
        while not self._ended.is_set():
            try:
                rang = self._queue.doorbell(self.name, self._times.door_s)
            except QueueAway:
                rang = True
                self._ended.wait(self._times.retry_s)
            if rang:
                self._rang = True
                self._wake.set()

    # -- turns --

    def _try_turn(self) -> float:
        """One turn; returns how long nothing is due."""
        try:
            self.turn()
        except QueueAway as error:
            return self._lost_sight(error)
        if self._away:
            log.info("the lease queue answers again")
        self._away, self._failures = False, 0
        return max(0.0, self._beat_at - time.monotonic())

    def _lost_sight(self, error: QueueAway) -> float:
        """Jobs go on; try again, later each time, and not all nodes at once."""
        if not self._away:
            log.warning("the lease queue is away, jobs go on: %s", error)
        self._away, self._rang, self._beat_at = True, True, 0.0
        times = self._times
        pause_s = min(times.retry_s * (1 << self._failures), times.retry_max_s)
        self._failures = min(self._failures + 1, 16)
        return pause_s * random.uniform(0.7, 1.0)  # noqa: S311 - spreads load, no secret

    def turn(self) -> None:
        """What is due now. Everything in it may be repeated after a failure."""
        rang, self._rang = self._rang, False
        try:
            self._give_back()
            news = self._outbox.forward()
            if rang:
                self._claim()
            if rang or news or time.monotonic() >= self._beat_at:
                self._beat()
        except QueueAway:
            self._rang = True
            raise

    def _claim(self) -> None:
        while True:
            claims = self._queue.claim(self.name, [self._ids.token() for _ in range(CLAIMS)])
            for claim in claims:
                self._accept(claim)
            self._give_back()
            if len(claims) < CLAIMS:
                return

    def _accept(self, claim: Claim) -> None:
        """Write the lease down, then launch; what cannot be launched is given back."""
        ticket = claim.ticket
        order = decode_order(claim.payload)
        if order is None:
            self._refuse(ticket, UNREADABLE)
            return
        entry = Entry(ticket=ticket, payload=claim.payload, gpus=order.gpus)
        log.info("job %d, attempt %d: claimed (%s)", ticket.job, ticket.epoch, order.name)
        try:
            self._journal.put(entry)
        except OSError as error:
            self._refuse(ticket, f"the agent's disk refuses to write: {error.strerror}")
            return
        self._launch(entry, order)

    def _launch(self, entry: Entry, order: LaunchOrder) -> None:
        if self._shared is not None and order.copy_from_epoch:
            self._shared.link_earlier(order)
        (result,) = self._local.launch([order])
        if result.status is not LaunchStatus.ACCEPTED:
            self._journal.strike(entry.key)
            self._refuse(entry.ticket, result.reason)

    def _refuse(self, ticket: Ticket, reason: str) -> None:
        """Noted here until the queue has it: it may be away just now."""
        log.warning("job %d: refused: %s", ticket.job, reason)
        report = Report(ticket=ticket, end=End.REFUSED, detail=reason, freed_age_ms=0)
        self._refusals.append(report)

    def _give_back(self) -> None:
        if self._refusals:
            self._queue.report(self._refusals)
            self._refusals = []

    # -- beats --

    def _beat(self) -> None:
        alive = [e for e in self._journal if not (e.ended or e.lost)]
        busy = {gpu for e in self._journal if e.lost for gpu in e.gpus}
        (node,) = self._local.inventory().nodes
        report = node_report(node, self._gauge, busy=busy, address=self._address)
        now_ms = self._clock.now_ms()
        leases = [
            LeaseBeat(
                ticket=e.ticket, started_age_ms=now_ms - e.started_ms if e.started_ms else None
            )
            for e in alive
        ]
        reply = self._queue.beat(report, leases)
        self._see(reply.state)
        for entry, verdict in zip(alive, reply.verdicts, strict=True):
            self._obey(entry, verdict)
        stable = self.state is NodeHealth.STABLE
        period_s = self._times.beat_s if stable else self._times.early_beat_s
        self._beat_at = time.monotonic() + period_s

    def _see(self, state: NodeHealth | None) -> None:
        if state is not self.state:
            log.info("the control plane sees this node as %s", state.value if state else "new")
        self.state = state

    def _obey(self, entry: Entry, verdict: LeaseVerdict) -> None:
        match verdict.answer:
            case BeatAnswer.LOST:
                log.warning("job %d: lease lost, stopping it", entry.ticket.job)
                entry.lost = True
                self._keep(entry)
                self._stop(entry, StopKind.LOST.value, self._times.stop_kill_s)
            case BeatAnswer.CANCEL:
                self._stop(entry, verdict.stop, verdict.kill_after_s)
            case BeatAnswer.RESUMED:
                log.info("job %d: goes on after the interruption", entry.ticket.job)
            case BeatAnswer.OK:
                pass

    def _keep(self, entry: Entry) -> None:
        try:
            self._journal.put(entry)
        except OSError as error:  # a full disk must not keep a job from being stopped
            log.warning("job %d: its lease file is not written: %s", entry.ticket.job, error)

    def _stop(self, entry: Entry, kind: str, kill_after_s: float) -> None:
        order = StopOrder(key=entry.key, kind=StopKind(kind), kill_after_s=kill_after_s)
        self._local.stop([order])

    # -- leaving --

    def _leave(self, kind: Bye) -> None:
        """OFF: leases go back at once, then the jobs are stopped. RESTART: they go on."""
        held = [e for e in self._journal if not (e.ended or e.lost)]
        self._say(lambda: self._queue.bye(self.name, kind, [e.ticket for e in held]))
        if kind is Bye.RESTART:
            log.info("agent ends, %d jobs go on and wait for its return", len(held))
            return
        log.info("node goes off, %d leases returned", len(held))
        for entry in held:
            entry.lost = True
            self._keep(entry)
            self._stop(entry, StopKind.LOST.value, self._times.stop_kill_s)
        end = time.monotonic() + self._times.stop_kill_s + 2
        while list(self._journal) and time.monotonic() < end and self._say(self._outbox.forward):
            self._wake.wait(0.2)
            self._wake.clear()

    def _say(self, step: Callable[[], object]) -> bool:
        try:
            step()
        except QueueAway as error:
            log.warning("the lease queue is away at the end: %s", error)
            return False
        return True
