"""Jobs on edge nodes. The queue holds the leases; this class tells what becomes of them.

One thread listens to the queue. While the queue is away nothing is concluded from it:
launches are UNKNOWN, the inventory is unreachable, and fences wait here until they arrive.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from dure.adapters.compute.edge.mirror import Mirror, NodeMirror
from dure.adapters.compute.edge.payload import INLINE_BYTES, decode_result, encode_order
from dure.core.lease import Enqueued, NodeView, QueueAway, Task, TaskView
from dure.core.model import Node
from dure.ports import (
    Clock,
    Exited,
    Freed,
    Inventory,
    LaunchOrder,
    LaunchResult,
    LaunchStatus,
    LeaseKey,
    LeaseQueue,
    LiveLease,
    NodeChanged,
    Observation,
    StopOrder,
)

log = logging.getLogger(__name__)

PAGE = 1000
_ANSWERS = {
    Enqueued.QUEUED: (LaunchStatus.ACCEPTED, ""),
    Enqueued.KNOWN: (LaunchStatus.ACCEPTED, ""),
    Enqueued.FENCED: (LaunchStatus.REFUSED, "fenced"),
    Enqueued.STALE: (LaunchStatus.REFUSED, "a newer attempt of this job is in the queue"),
}


class EdgeBackend:
    """The `ComputeBackend` of edge nodes. Its lock is never held while the queue is asked.

    `shared_runs` holds the agents' run folders, by node, where storage is shared; else the
    end of each log comes with the result and is kept under `logs`. `on_node` hears of each
    new node before the engine does.
    """

    name = "edge"

    def __init__(
        self,
        queue: LeaseQueue,
        clock: Clock,
        *,
        logs: Path,
        shared_runs: Path | None = None,
        poll_s: float = 1.0,
        on_node: Callable[[Node], None] = lambda _: None,
    ) -> None:
        self._queue = queue
        self._clock = clock
        self._logs = logs
        self._shared_runs = shared_runs
        self._poll_s = poll_s
        self._on_node = on_node
        self._lock = threading.Lock()
        self._mirror = Mirror()
        self._nodes = NodeMirror()
        self._record = _Record(clock.now_ms() * 1000)
        self._cursor = 0
        self._ahead_ms = 0
        self._away = "the lease queue has not answered yet"
        self._to_fence: set[LeaseKey] = set()
        self._to_settle: set[LeaseKey] = set()
        self._hint: Callable[[], None] = lambda: None
        self._closed = threading.Event()
        try:
            self._sync()
        except QueueAway as error:
            self._lost(error)
        self._thread = threading.Thread(target=self._loop, name="dure-edge", daemon=True)
        self._thread.start()

    # -- port --

    def inventory(self) -> Inventory:
        """Nodes as the watchdog sees them; unreachable while the queue is."""
        with self._lock:
            return Inventory(nodes=tuple(self._nodes.nodes.values()), unreachable=self._away)

    def launch(self, orders: Sequence[LaunchOrder]) -> list[LaunchResult]:
        """Put attempts into the line; each epoch enters it once."""
        tasks: list[tuple[LeaseKey, Task]] = []
        answers: dict[LeaseKey, tuple[LaunchStatus, str]] = {}
        for order in orders:
            payload = encode_order(order)
            reason = self._unfit(order, payload)
            if reason:
                answers[order.key] = (LaunchStatus.REFUSED, reason)
            else:
                tasks.append((order.key, _task(order, payload)))
        answers |= self._enqueue(tasks)
        keys = [order.key for order in orders]
        return [LaunchResult(key=k, status=answers[k][0], reason=answers[k][1]) for k in keys]

    def stop(self, orders: Sequence[StopOrder]) -> None:
        """Ask the holders; what does not arrive now the reconciler asks again."""
        try:
            self._queue.cancel(orders)
        except QueueAway as error:
            log.warning("edge: %d stop orders have to wait: %s", len(orders), error)

    def fence(self, keys: Sequence[LeaseKey]) -> None:
        """Silent from now on; made true in the queue now, or as soon as it is back."""
        with self._lock:
            for key in keys:
                self._mirror.fenced(key)
            self._to_fence.update(keys)
        try:
            self._send()
        except QueueAway as error:
            log.warning("edge: %d fences have to wait: %s", len(keys), error)

    def observe(self, cursor: int) -> tuple[list[Observation], int]:
        """What has been seen after `cursor`."""
        with self._lock:
            return self._record.read(cursor, self._recorded)

    def leases(self) -> list[LiveLease]:
        """Every lease whose end is not recorded, except fenced ones."""
        with self._lock:
            return self._mirror.leases()

    def watch(self, hint: Callable[[], None]) -> None:
        """Remember whom to tell."""
        self._hint = hint

    def log_path(self, key: LeaseKey) -> str | None:
        """The attempt's log: live where storage is shared, else once it has ended."""
        run = f"{key.job}/{key.epoch}/log"
        found = [self._logs / run]
        if self._shared_runs is not None:
            # A link leads to another node's folder, where the log is found as well.
            found += sorted(self._shared_runs.glob(f"*/{run}"))
        return next((str(path) for path in found if path.is_file()), None)

    def close(self) -> None:
        """Stop listening; leases and jobs go on."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(self._poll_s + 1)

    # -- launching --

    def _unfit(self, order: LaunchOrder, payload: bytes) -> str:
        """Why this order cannot go into the queue; empty if it can."""
        if not order.command:
            return "the command is empty"
        if len(payload) > INLINE_BYTES:
            return f"the job's description has {len(payload)} bytes; at most {INLINE_BYTES} fit"
        with self._lock:
            known = order.placement.node in self._nodes.nodes or bool(self._away)
        return "" if known else f"no agent has ever reported node {order.placement.node}"

    def _enqueue(
        self, tasks: Sequence[tuple[LeaseKey, Task]]
    ) -> dict[LeaseKey, tuple[LaunchStatus, str]]:
        if not tasks:
            return {}
        try:
            answers = self._queue.enqueue([task for _, task in tasks])
        except QueueAway as error:
            return {key: (LaunchStatus.UNKNOWN, str(error)) for key, _ in tasks}
        with self._lock:
            for (key, _), answer in zip(tasks, answers, strict=True):
                if answer is Enqueued.QUEUED:
                    self._mirror.launched(key)
        return {key: _ANSWERS[answer] for (key, _), answer in zip(tasks, answers, strict=True)}

    def _recorded(self, observation: Observation) -> None:
        """The engine has recorded this; after the last of a lease nothing is held."""
        if isinstance(observation, Freed):
            self._mirror.settled(observation.key)
            self._to_settle.add(observation.key)

    # -- listening --

    def _loop(self) -> None:
        while not self._closed.is_set():
            try:
                self._queue.news(self._poll_s)
                self._sync()
            except QueueAway as error:
                self._lost(error)
                self._closed.wait(self._poll_s)
            except Exception:
                # One bad record or a hint that fails must not blind the server to all nodes.
                log.exception("edge backend")
                self._closed.wait(self._poll_s)

    def _lost(self, error: QueueAway) -> None:
        if not self._away:
            log.warning("edge: the lease queue is away: %s", error)
        with self._lock:
            self._away = f"the lease queue cannot be reached: {error}"

    def _sync(self) -> None:
        """Send what waits here, then take in what is new."""
        self._send()
        views = self._queue.nodes()
        news = self._take_nodes(views.now_ms, views.nodes)
        while True:
            page = self._queue.changes(self._cursor, PAGE)
            news |= self._take_tasks(page.tasks)
            self._cursor = page.cursor
            if len(page.tasks) < PAGE:
                break
        with self._lock:
            self._away = ""
        if news:
            self._hint()

    def _send(self) -> None:
        with self._lock:
            fences, settled = list(self._to_fence), list(self._to_settle)
        if fences:
            self._queue.fence(fences)
        if settled:
            self._queue.settle(settled)
        with self._lock:
            self._to_fence.difference_update(fences)
            self._to_settle.difference_update(settled)

    def _take_nodes(self, now_ms: int, views: tuple[NodeView, ...]) -> bool:
        ahead_ms = now_ms - self._clock.now_ms()
        if abs(ahead_ms - self._ahead_ms) > 1000:
            self._ahead_ms = ahead_ms  # smaller steps are the way to the queue and back
        with self._lock:
            changed = self._nodes.take(views, lambda at_ms: at_ms - self._ahead_ms)
        for node in changed:
            self._on_node(node)
        with self._lock:
            for node in changed:
                self._record.add(NodeChanged(node=node))
        return bool(changed)

    def _take_tasks(self, tasks: Sequence[TaskView]) -> bool:
        seen = False
        for view in tasks:
            with self._lock:
                news = list(self._mirror.take(view, self._ahead_ms))
            if any(isinstance(o, Exited) for o in news):
                self._keep_log(view)
            with self._lock:
                for observation in news:
                    self._record.add(observation)
            seen |= bool(news)
        return seen

    def _keep_log(self, view: TaskView) -> None:
        """The end of the log that came with a result, before anybody is told of the end."""
        result = decode_result(view.result) if view.result else None
        if result is None or not result.log or self._shared_runs is not None:
            return
        folder = self._logs / str(view.job) / str(view.epoch)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (folder / "log").open("wb") as file:
                if result.log_cut:
                    cut = f"dure: the first {result.log_cut} bytes of this log stayed on the node\n"
                    file.write(cut.encode())
                file.write(result.log)
        except OSError as error:
            log.warning("job %d: its log could not be kept: %s", view.job, error)


class _Record:
    """Observations until they are acknowledged; cursors of an earlier life acknowledge none."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._seen: list[Observation] = []

    def add(self, observation: Observation) -> None:
        self._seen.append(observation)

    def read(
        self, cursor: int, done: Callable[[Observation], None]
    ) -> tuple[list[Observation], int]:
        count = cursor - self._start
        if 0 < count <= len(self._seen):
            for observation in self._seen[:count]:
                done(observation)
            del self._seen[:count]
            self._start = cursor
        return list(self._seen), self._start + len(self._seen)


def _task(order: LaunchOrder, payload: bytes) -> Task:
    return Task(
        job=order.key.job,
        epoch=order.key.epoch,
        node=order.placement.node,
        payload=payload,
        need_vram_mib=order.vram_mib,
        idempotent=order.idempotent,
    )
