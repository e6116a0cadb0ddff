"""Watches edge nodes: listens, probes, marks, and sweeps leases that nobody keeps alive.

All judgement is `core.health`; this thread only brings it the facts and carries out what it
says. Two watchdogs on one queue do no harm: every step there is conditional.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import structlog

from dure.core import health
from dure.core.health import HealthRule, Watched
from dure.core.lease import NodeMark, NodeView, NodeViews, QueueAway
from dure.core.model import NodeHealth, NodeId
from dure.ports import Clock, LeaseQueue, Prober

log = structlog.get_logger("dure.watchdog")

PROBES = 8
"""Probes on their way at a time."""


class Watchdog:
    """One thread; `tick` is one look, for tests that move the clock themselves."""

    def __init__(
        self,
        queue: LeaseQueue,
        prober: Prober,
        clock: Clock,
        rule: HealthRule,
        *,
        tick_s: float = 1.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._prober = prober
        self._clock = clock
        self._rule = rule
        self._tick_s = tick_s
        self._on_change = on_change
        self._watched: dict[NodeId, Watched] = {}
        self._marks: dict[NodeId, NodeMark] = {}
        self._probing: dict[NodeId, Future[health.Signal]] = {}
        self._pool = ThreadPoolExecutor(PROBES, thread_name_prefix="dure-probe")
        self._doubt = health.doubting(clock.now_ms(), rule)
        self._listening_ms: int | None = None
        self._away = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch until `close`."""
        self._thread = threading.Thread(target=self._loop, name="dure-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; nodes and leases stay as they are."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(self._tick_s + 1)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _loop(self) -> None:
        while not self._closed.wait(self._tick_s):
            try:
                self.tick()
            except Exception:
                # Loop top: a node that cannot be judged must not end the watch over all.
                log.exception("watchdog_failed")

    def tick(self) -> None:
        """One look at all nodes, then one sweep. While the queue is away nobody is judged."""
        try:
            self._look(self._queue.nodes(), self._queue.connected())
            self._sweep()
        except QueueAway as error:
            if not self._away:
                log.warning("lease_queue_away", error=str(error))
            self._away = True
            self._listening_ms = None
            self._doubt = health.doubting(self._clock.now_ms(), self._rule)
        else:
            self._away = False

    # -- nodes --

    def _look(self, views: NodeViews, connected: frozenset[NodeId] | None) -> None:
        now = views.now_ms
        if self._listening_ms is None or now < self._listening_ms:
            self._listening_ms = now
        marks = []
        for view in views.nodes:
            node = view.report.node
            watched = self._watched.get(node) or health.found(view, now, self._rule)
            here = None if connected is None else node in connected
            watched = health.look(watched, view, here, now, self._listening_ms, self._rule)
            watched = self._probe(watched, view, now)
            self._watched[node] = watched
            mark = health.mark(watched, view, now, self._rule)
            if self._marks.get(node) != mark:
                marks.append(mark)
        self._write(marks)
        for gone in self._watched.keys() - {view.report.node for view in views.nodes}:
            del self._watched[gone]
            self._marks.pop(gone, None)

    def _probe(self, watched: Watched, view: NodeView, now: int) -> Watched:
        """Take in the answer of the last probe, and send the next one when it is due."""
        node, level = view.report.node, watched.level1
        running = self._probing.get(node)
        if running is not None and running.done():
            del self._probing[node]
            level = health.step(level, running.result(), now, self._rule)
            running = None
        if running is None and health.probe_due(level, now, self._rule):
            level = health.probed(level, now)
            self._probing[node] = self._pool.submit(self._prober.probe, view.report.address)
        return msgspec.structs.replace(watched, level1=level)

    def _write(self, marks: list[NodeMark]) -> None:
        if not marks:
            return
        self._queue.mark(marks)
        for mark in marks:
            old = self._marks.get(mark.node)
            self._marks[mark.node] = mark
            if old is None or (old.state, old.ready) != (mark.state, mark.ready):
                cause = self._watched[mark.node].level1.cause
                tell = log.warning if mark.state is not NodeHealth.STABLE else log.info
                tell("node", node=mark.node, state=mark.state, ready=mark.ready, cause=cause)
        self._on_change()

    # -- leases --

    def _sweep(self) -> None:
        now = self._clock.now_ms()
        rule = health.sweep_rule(self._doubt, now, self._rule)
        swept = self._queue.sweep(rule)
        before = self._doubt
        self._doubt = health.after_sweep(before, swept, now, self._rule)
        if self._doubt.armed_ms > before.armed_ms and before.run_id:
            log.warning("leases_not_judged_for_a_while", run_id=swept.run_id)
        if swept.braked and not before.braked_ms:
            log.warning("many_leases_silent_at_once", leases=swept.braked)
        for expired in swept.expired:
            log.warning("lease_expired", **msgspec.to_builtins(expired))
