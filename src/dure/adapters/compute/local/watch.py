"""The local backend's one thread: sockets of supervisors, and leases without one."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from dure.adapters.compute.local.cgroups import Group
from dure.adapters.compute.local.leases import NEVER, Chronicle, Held, Record, Shelf
from dure.adapters.compute.local.processes import Tree, marked, processes, send_signal
from dure.adapters.compute.local.rundir import Spec
from dure.adapters.compute.local.spawn import Spawner
from dure.core.model import Gpu, Node, NodeHealth
from dure.ports import (
    Beat,
    Freed,
    GpuChanged,
    LeaseExpired,
    LeaseKey,
    NodeChanged,
    Observation,
)

log = logging.getLogger(__name__)

STARTING = max(4, os.cpu_count() or 1)
"""Supervisors that may be starting at a time."""
STARTING_S = 1.0
"""One that takes longer copies an output folder, and is not waited for."""


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the local backend in seconds; tests shorten them."""

    start_s: float = 15.0
    """A supervisor that holds no lock after this is replaced, once."""
    leftover_kill_s: float = 30.0
    """From the end of a command to SIGKILL for what it left behind."""
    lost_kill_s: float = 30.0
    """From SIGTERM to SIGKILL for fenced leases and for orphans of a dead supervisor."""
    beat_s: float = 15.0
    poll_s: float = 0.25
    """How often orphans are looked for."""
    node_s: float = 10.0
    """How often the GPUs are looked at."""


class Watch:
    """Runs from `start` to `close`. All state is the backend's, under its lock."""

    def __init__(
        self,
        *,
        lock: threading.Lock,
        held: dict[LeaseKey, Held],
        shelf: Shelf,
        record: Record,
        chronicle: Chronicle,
        spawner: Spawner,
        node: Callable[[], Node],
        durations: Durations,
    ) -> None:
        self.hint: Callable[[], None] = lambda: None
        self._lock = lock
        self._held = held
        self._shelf = shelf
        self._record = record
        self._chronicle = chronicle
        self._spawner = spawner
        self._ask_node = node
        self._node: Node | None = None
        self._node_at = 0.0
        self._durations = durations
        self._queue: deque[Held] = deque()
        self._spawn_at = 0.0
        self._news = False
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._loop, name="dure-local", daemon=True)

    def start(self) -> None:
        """Look at everything that is held, then keep watching."""
        with self._lock:
            self._tick()
        self._thread.start()

    def wake(self) -> None:
        """Look at due leases now. Call without the lock or with it."""
        try:
            self._wake_in.send(b"x")
        except OSError:
            return  # full: it is awake already; closed: nobody watches

    def close(self) -> None:
        """End the thread and close every connection; supervisors do not mind."""
        self._closed = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            for held in self._held.values():
                self._unlink(held)
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()
            self._spawner.close()

    def enqueue(self, held: Held) -> None:
        """Spawn a supervisor for it soon; the lock is held. What is on disk lets a crash pass."""
        self._queue.append(held)

    def send_stop(self, held: Held) -> None:
        """Send a lease's stop order; without a link it goes out with the next one."""
        if held.stop is None or held.link is None:
            return
        try:
            held.link.send(msgspec.json.encode(held.stop) + b"\n")
        except OSError:
            held.look_at = 0.0  # the link is over; whoever comes next reads `stop.json`

    # -- thread --

    def _loop(self) -> None:
        while not self._closed:
            with self._lock:
                wait = self._wait_s()
            ready = self._selector.select(wait)
            try:
                with self._lock:
                    for entry, _ in ready:
                        self._read(entry.fileobj, entry.data)
                    self._tick()
                    news, self._news = self._news, False
                if news:
                    self.hint()
            except Exception:
                # One bad file or a hint that fails must not blind the server to all jobs.
                log.exception("local backend")
                time.sleep(0.1)

    def _wait_s(self) -> float:
        due = [held.look_at for held in self._held.values() if held.spawns]
        due += [h.beat_at for h in self._held.values() if self._beats(h)]
        due.append(self._node_at)
        if self._queue:
            due.append(self._spawn_at)
        return max(0.0, min(due) - time.monotonic())

    def _read(self, sock: object, held: Held | None) -> None:
        """Lines only say that there is something to read; the files hold it."""
        assert isinstance(sock, socket.socket)
        try:
            data = sock.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if held is None:
            return
        held.look_at = 0.0
        if not data and held.link is sock:
            self._unlink(held)

    def _tick(self) -> None:
        self._spawner.reap()
        now = time.monotonic()
        tree: Tree = {}
        for held in list(self._held.values()):
            if held.look_at <= now and held.spawns:
                if held.lost_at is not None and not tree:
                    tree = processes()
                self._look(held, now, tree)
            if self._beats(held) and held.beat_at <= now:
                held.beat_at = now + self._durations.beat_s
                beat = Beat(key=held.key, at_ms=self._chronicle.now(held))
                self._news |= self._record.beat(beat)
        self._spawn_queued()
        if now >= self._node_at:
            self._node_at = now + self._durations.node_s
            self._compare(self._ask_node())

    @staticmethod
    def _beats(held: Held) -> bool:
        ended = held.exited or held.freed or held.fenced
        return held.started and held.link is not None and not ended

    def _tell(self, held: Held, observation: Observation) -> None:
        if not held.fenced:
            self._record.add(observation)
            self._news = True

    # -- spawning --

    def _spawn_queued(self) -> None:
        """A few at a time: a hundred at once would only take the processor from each other."""
        now = time.monotonic()
        if not self._queue or now < self._spawn_at:
            return
        starting = sum(
            not (h.started or h.exited) and h.spawned_at > now - STARTING_S
            for h in self._held.values()
        )
        self._spawn_at = now + 0.02
        while self._queue and starting < STARTING:
            held = self._queue[0]
            try:
                self._spawn(held)
            except OSError as error:
                log.warning("job %d: no supervisor yet: %s", held.key.job, error)
                self._spawn_at = now + 1.0
                return
            self._queue.popleft()
            starting += 1

    def _spawn(self, held: Held) -> None:
        held.child, link = self._spawner.spawn(held.run)
        held.spawns += 1
        held.spawned_at = time.monotonic()
        self._link(held, link)
        held.look_at = held.spawned_at + self._durations.start_s

    # -- one lease --

    def _look(self, held: Held, now: float, tree: Tree) -> None:
        """Say what is new, and find out what to do about a lease without a supervisor."""
        held.look_at = NEVER
        for observation in self._chronicle.advance(held):
            self._tell(held, observation)
        if held.freed:
            self._finish(held)
        elif held.lost_at is not None:
            self._hunt(held, now, tree)
        elif held.link is not None:
            self._check_start(held, now)
        else:
            link = held.run.connect()
            if link is not None:
                self._link(held, link)
                self.send_stop(held)
                held.look_at = now  # it may have written something before this link
            elif held.run.is_alive():
                held.look_at = now + 0.05
            else:
                self._without_supervisor(held, now)

    def _check_start(self, held: Held, now: float) -> None:
        """Whether a spawned supervisor has come to hold its lock in time."""
        if held.started or held.exited or not held.child:
            return
        late = held.spawned_at + self._durations.start_s
        if now < late:
            held.look_at = late
        elif not held.run.is_alive():
            self._spawner.kill(held.child)  # the end of its link brings it back here

    def _without_supervisor(self, held: Held, now: float) -> None:
        """No lock, no socket: it has ended, was killed, or never came up."""
        for observation in self._chronicle.advance(held):  # its very last words
            self._tell(held, observation)
        spec = held.run.spec()
        if held.freed or spec is None:
            self._finish(held)
        elif spec.boot_id != self._chronicle.boot_id:
            self._lose(held, NodeHealth.OFFLINE)
            self._free(held)
        elif held.started or held.exited:
            self._lose(held, NodeHealth.STABLE)
        elif not held.child and now < held.spawned_at + self._durations.start_s:
            held.look_at = now + 0.1  # spawned by an earlier server, perhaps just now
        elif held.spawns < 2 and not marked(processes(), list(spec.marks)):
            self.enqueue(held)
        else:
            self._lose(held, NodeHealth.STABLE)

    def _lose(self, held: Held, state: NodeHealth) -> None:
        """The supervisor is gone: say so at once and end what it has left."""
        held.lost_at = time.monotonic()
        held.look_at = held.lost_at
        if not held.exited and not held.lost_told:
            at_ms = self._chronicle.now(held)
            self._tell(held, LeaseExpired(key=held.key, at_ms=at_ms, node_state=state))
        held.lost_told = True
        spec = held.run.spec()
        if spec is not None:
            for pid in marked(processes(), list(spec.marks)):
                send_signal(pid, signal.SIGTERM)

    def _hunt(self, held: Held, now: float, tree: Tree) -> None:
        """Free the GPUs only when no orphan of the job lives."""
        spec = held.run.spec() or Spec(argv=(), env={}, cwd="", marks=())
        alive = _alive(spec, tree)
        if not alive:
            self._free(held)
            return
        assert held.lost_at is not None
        kill_s = self._durations.lost_kill_s
        if now >= held.lost_at + kill_s:
            for pid in alive:
                send_signal(pid, signal.SIGKILL)
        held.look_at = now + self._durations.poll_s

    def _free(self, held: Held) -> None:
        held.freed = True
        _remove_group(held)
        self._tell(held, Freed(key=held.key, at_ms=self._chronicle.now(held)))
        self._finish(held)

    def _finish(self, held: Held) -> None:
        """Nothing is left to watch; what was fenced needs no acknowledgement either."""
        held.look_at = NEVER
        self._unlink(held)
        if held.fenced:
            self._held.pop(held.key, None)
            self._shelf.collect(held.key)
            self._node_at = 0.0

    # -- links and the node --

    def _link(self, held: Held, link: socket.socket) -> None:
        held.link = link
        held.beat_at = time.monotonic() + self._durations.beat_s
        self._selector.register(link, selectors.EVENT_READ, held)

    def _unlink(self, held: Held) -> None:
        if held.link is not None:
            self._selector.unregister(held.link)
            held.link.close()
            held.link = None

    def _compare(self, node: Node) -> None:
        """Tell what has changed of the machine since the last look."""
        old, self._node = self._node, node
        if old is None or old == node:
            return
        before: dict[int, Gpu] = {gpu.index: gpu for gpu in old.gpus}
        same = before.keys() == {gpu.index for gpu in node.gpus}
        if not same or msgspec.structs.replace(old, gpus=node.gpus) != node:
            self._record.add(NodeChanged(node=node))
        else:
            for gpu in node.gpus:
                if gpu != before[gpu.index]:
                    self._record.add(GpuChanged(node=node.name, gpu=gpu))
        self._news = True


def _group(spec: Spec | None) -> Group | None:
    """The control group that a lost supervisor has left behind."""
    layout = spec.cgroup if spec is not None else None
    if layout is None:
        return None
    return Group({"version": layout.version, "folders": layout.folders})


def _alive(spec: Spec, tree: Tree) -> set[int]:
    """Processes of a job, by their marks and by its control group."""
    group = _group(spec)
    return marked(tree, list(spec.marks)) | (group.members() if group else set())


def _remove_group(held: Held) -> None:
    group = _group(held.run.spec())
    if group is not None and not group.remove():
        log.warning("job %d: its control group could not be removed", held.key.job)
