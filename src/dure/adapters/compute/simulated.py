"""A backend of declared machines that only pretend to run jobs.

The fake that ships: the simulator, the benchmarks and the fault tests drive it, and it
passes the same contract suite as the real ones. With a journal file its truth survives
the death of the process that holds it, as real machines do.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dure.core.model import Evidence, Node
from dure.ports import (
    Clock,
    Exited,
    Freed,
    Inventory,
    LaunchOrder,
    LaunchResult,
    LaunchStatus,
    LeaseKey,
    LiveLease,
    LivePhase,
    Observation,
    Started,
    StopOrder,
)


class SimRun(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt behaves: its times, its end, and how it answers a stop."""

    start_ms: int = 0
    run_ms: int = 1000
    linger_ms: int = 0
    evidence: Evidence = Evidence(exit_code=0)
    refuse: str = ""
    save_ms: int = 0
    """Time it takes to end after SIGTERM; longer than the kill time means SIGKILL."""


Script = Callable[[LaunchOrder], SimRun]


class _Live(msgspec.Struct):
    phase: LivePhase
    run: SimRun
    generation: int = 0
    stopped: bool = False


class _Note(msgspec.Struct):
    """One journal line: something became due at `at_ms` for a lease."""

    at_ms: int
    key: LeaseKey
    step: str
    generation: int = 0
    evidence: Evidence | None = None
    run: SimRun | None = None


class SimulatedBackend:
    """Machines made of nothing; `script` says how each attempt behaves."""

    def __init__(
        self,
        clock: Clock,
        nodes: Sequence[Node],
        script: Script | None = None,
        journal: Path | None = None,
        name: str = "simulated",
    ) -> None:
        self.name = name
        self.nodes = tuple(nodes)
        self.launches: list[LaunchOrder] = []
        self._clock = clock
        self._script = script or (lambda _: SimRun())
        self._live: dict[LeaseKey, _Live] = {}
        self._fenced: set[LeaseKey] = set()
        self._done: set[LeaseKey] = set()
        self._seen: list[Observation] = []
        self._base = 0
        self._due: list[tuple[int, int, _Note]] = []
        self._count = 0
        self._hint: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._journal: int | None = None
        if journal is not None:
            self._replay(journal)
            self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    # -- port --

    def inventory(self) -> Inventory:
        """The declared nodes."""
        return Inventory(nodes=self.nodes)

    def launch(self, orders: Sequence[LaunchOrder]) -> list[LaunchResult]:
        """Start pretending; a key known already is accepted again and does nothing."""
        with self._lock:
            return [self._launch(order) for order in orders]

    def stop(self, orders: Sequence[StopOrder]) -> None:
        """End the attempt after its `save_ms`, or by SIGKILL at the order's time."""
        with self._lock:
            for order in orders:
                live = self._live.get(order.key)
                if live is None or live.stopped or live.phase is LivePhase.ENDED:
                    continue
                live.stopped = True
                kill_ms = round(order.kill_after_s * 1000)
                killed = live.run.save_ms > kill_ms
                evidence = Evidence(signal=9) if killed else Evidence(exit_code=0)
                at_ms = self._clock.now_ms() + min(live.run.save_ms, kill_ms)
                self._end_at(at_ms, order.key, live, evidence, linger_ms=0)
        self._hint()

    def fence(self, keys: Sequence[LeaseKey]) -> None:
        """Forget these leases at once; nothing of them is reported any more."""
        with self._lock:
            for key in keys:
                self._fenced.add(key)
                self._note(_Note(at_ms=0, key=key, step="fence"))
                if key in self._live:
                    self._live[key].phase = LivePhase.ENDED
                    self._live[key].generation += 1

    def observe(self, cursor: int) -> tuple[list[Observation], int]:
        """What has become due until now."""
        with self._lock:
            self._settle(self._clock.now_ms())
            # A cursor of an earlier life acknowledges nothing.
            if self._base < cursor <= self._base + len(self._seen):
                for seen in self._seen[: cursor - self._base]:
                    if isinstance(seen, Freed):
                        self._live.pop(seen.key, None)
                        self._done.add(seen.key)
                del self._seen[: cursor - self._base]
                self._base = cursor
            return list(self._seen), self._base + len(self._seen)

    def leases(self) -> list[LiveLease]:
        """Every lease whose end has not been acknowledged."""
        with self._lock:
            self._settle(self._clock.now_ms())
            return [
                LiveLease(key=k, phase=v.phase)
                for k, v in self._live.items()
                if k not in self._fenced
            ]

    def watch(self, hint: Callable[[], None]) -> None:
        """Remember whom to tell."""
        self._hint = hint

    def log_path(self, key: LeaseKey) -> str | None:
        """Pretending leaves no log."""
        del key
        return None

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    def next_due_ms(self) -> int | None:
        """When something will happen next, for a virtual clock."""
        return self._due[0][0] if self._due else None

    # -- inside --

    def _launch(self, order: LaunchOrder) -> LaunchResult:
        key = order.key
        if key in self._fenced:
            return LaunchResult(key=key, status=LaunchStatus.REFUSED, reason="fenced")
        if key in self._live or key in self._done:
            return LaunchResult(key=key, status=LaunchStatus.ACCEPTED)
        run = self._script(order)
        if run.refuse:
            return LaunchResult(key=key, status=LaunchStatus.REFUSED, reason=run.refuse)
        self.launches.append(order)
        self._note(_Note(at_ms=self._clock.now_ms(), key=key, step="launch", run=run))
        self._begin(key, run, self._clock.now_ms())
        return LaunchResult(key=key, status=LaunchStatus.ACCEPTED)

    def _begin(self, key: LeaseKey, run: SimRun, now_ms: int) -> None:
        live = self._live[key] = _Live(phase=LivePhase.STARTING, run=run)
        self._push(_Note(at_ms=now_ms + run.start_ms, key=key, step="started"))
        end_ms = now_ms + run.start_ms + run.run_ms
        self._plan_end(end_ms, key, live, run.evidence, run.linger_ms)

    def _end_at(
        self, at_ms: int, key: LeaseKey, live: _Live, evidence: Evidence, linger_ms: int
    ) -> None:
        live.generation += 1
        note = _Note(at_ms=at_ms, key=key, step="end", evidence=evidence)
        self._note(note)
        self._plan_end(at_ms, key, live, evidence, linger_ms)

    def _plan_end(
        self, at_ms: int, key: LeaseKey, live: _Live, evidence: Evidence, linger_ms: int
    ) -> None:
        g = live.generation
        self._push(_Note(at_ms=at_ms, key=key, step="exited", generation=g, evidence=evidence))
        self._push(_Note(at_ms=at_ms + linger_ms, key=key, step="freed", generation=g))

    def _push(self, note: _Note) -> None:
        self._count += 1
        heapq.heappush(self._due, (note.at_ms, self._count, note))

    def _settle(self, now_ms: int) -> None:
        while self._due and self._due[0][0] <= now_ms:
            self._happen(heapq.heappop(self._due)[2])

    def _happen(self, note: _Note) -> None:
        live = self._live.get(note.key)
        if live is None or note.key in self._fenced:
            return
        if note.step == "started":
            if live.phase is LivePhase.STARTING:
                live.phase = LivePhase.RUNNING
                self._seen.append(Started(key=note.key, at_ms=note.at_ms))
        elif note.generation != live.generation:
            return
        elif note.step == "exited":
            live.phase = LivePhase.ENDED
            evidence = note.evidence or Evidence()
            self._seen.append(Exited(key=note.key, at_ms=note.at_ms, evidence=evidence))
        else:
            self._seen.append(Freed(key=note.key, at_ms=note.at_ms))

    def _note(self, note: _Note) -> None:
        if self._journal is not None:
            os.write(self._journal, msgspec.json.encode(note) + b"\n")

    def _replay(self, journal: Path) -> None:
        """Become what the journal says; a torn last line was never promised to anyone."""
        if not journal.exists():
            return
        for line in journal.read_bytes().splitlines():
            try:
                note = msgspec.json.decode(line, type=_Note)
            except msgspec.DecodeError:
                continue
            if note.step == "launch" and note.run is not None:
                self._begin(note.key, note.run, note.at_ms)
            elif note.step == "fence":
                self._fenced.add(note.key)
            elif note.evidence is not None and note.key in self._live:
                live = self._live[note.key]
                live.generation += 1
                live.stopped = True
                self._plan_end(note.at_ms, note.key, live, note.evidence, 0)
