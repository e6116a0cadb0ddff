"""One lease of the local backend, and what its run directory says about it."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from dure.adapters.compute.local.rundir import RunDir, Stamp, Stop
from dure.core.model import JobId
from dure.ports import Beat, Clock, Exited, Freed, LeaseKey, LivePhase, Observation, Started

NEVER = math.inf


class Held(msgspec.Struct, kw_only=True, eq=False):
    """A lease that is not collected yet. Times are `time.monotonic()`."""

    key: LeaseKey
    run: RunDir
    gpus: tuple[int, ...] = ()
    started: bool = False
    exited: bool = False
    freed: bool = False
    fenced: bool = False
    last_ms: int = 0
    """Time of the newest observation: a lease's times never run backwards."""
    link: socket.socket | None = None
    child: int = 0
    """The supervisor, if this process spawned it."""
    spawns: int = 0
    spawned_at: float = 0.0
    look_at: float = 0.0
    """When its files are to be read again; lines and ends of the link set it."""
    beat_at: float = 0.0
    stop: Stop | None = None
    lost_at: float | None = None
    """When its supervisor was found dead: the clock of SIGTERM and SIGKILL for orphans."""
    lost_told: bool = False
    killed: bool = False

    @property
    def phase(self) -> LivePhase:
        """What `leases()` answers."""
        if self.exited or self.freed or self.lost_told:
            return LivePhase.ENDED
        return LivePhase.RUNNING if self.started else LivePhase.STARTING


class Chronicle:
    """Turns the files of a lease into observations, each once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()

    def advance(self, held: Held) -> Iterator[Observation]:
        """What the files say beyond what was said already, in order."""
        if held.freed:
            return
        end = held.run.exit()
        # Read after the end: whoever has an end has its start on disk already.
        status = None if held.started or held.exited else held.run.status()
        if status is not None:
            held.started = True
            yield Started(key=held.key, at_ms=self._at(held, status.started, status.boot_id))
        if end is None:
            return
        if not held.exited:
            held.exited = True
            at_ms = self._at(held, end.ended, end.boot_id)
            yield Exited(key=held.key, at_ms=at_ms, evidence=end.evidence())
        if end.freed is not None:
            held.freed = True
            yield Freed(key=held.key, at_ms=self._at(held, end.freed, end.boot_id))

    def now(self, held: Held) -> int:
        """The time for something that is seen now."""
        held.last_ms = max(held.last_ms, self._clock.now_ms())
        return held.last_ms

    def _at(self, held: Held, stamp: Stamp, boot_id: str) -> int:
        """The stamp in the server's time; the wall clock's word after a restart."""
        at_ms = stamp.wall_ms
        if boot_id == self.boot_id:
            boot_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
            at_ms = self._clock.now_ms() - (boot_ms - stamp.boot_ms)
        held.last_ms = max(held.last_ms, at_ms)
        return held.last_ms


class Shelf:
    """The folder of all run directories: `<job>/<epoch>/`, and `live/` with one name each.

    `live/` lists what is not collected, so that a start looks at those only.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._live = self.root / "live"
        self._live.mkdir(mode=0o700, parents=True, exist_ok=True)

    def run(self, key: LeaseKey) -> RunDir:
        """Where an attempt lives, whether it exists or not."""
        return RunDir(self.root / str(key.job) / str(key.epoch))

    def earlier_output(self, key: LeaseKey, newest: int) -> str:
        """Newest output folder of an earlier attempt, from epoch `newest` down."""
        for epoch in range(min(newest, key.epoch - 1), 0, -1):
            out = self.run(LeaseKey(job=key.job, epoch=epoch)).out
            if out.is_dir() and not out.is_symlink():
                return str(out)
        return ""

    def open(self, key: LeaseKey) -> None:
        """List it as live, before anything of it exists."""
        (self._live / f"{key.job}-{key.epoch}").touch(mode=0o600)

    def collect(self, key: LeaseKey) -> None:
        """Its end is recorded elsewhere: never report it again."""
        (self._live / f"{key.job}-{key.epoch}").unlink(missing_ok=True)

    def live(self) -> list[LeaseKey]:
        """All that is not collected, oldest job first."""
        keys = []
        for entry in self._live.iterdir():
            job, _, epoch = entry.name.partition("-")
            if job.isdigit() and epoch.isdigit():
                keys.append(LeaseKey(job=JobId(int(job)), epoch=int(epoch)))
        return sorted(keys, key=lambda key: (key.job, key.epoch))


class Record:
    """Observations until they are acknowledged; cursors of an earlier life acknowledge none."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._seen: list[Observation] = []
        self._beats: set[LeaseKey] = set()

    def add(self, observation: Observation) -> None:
        """One more."""
        self._seen.append(observation)

    def beat(self, beat: Beat) -> bool:
        """A beat, unless one waits to be read: nobody reading must not fill the memory."""
        if beat.key in self._beats:
            return False
        self._beats.add(beat.key)
        self._seen.append(beat)
        return True

    def read(
        self, cursor: int, done: Callable[[Observation], None]
    ) -> tuple[list[Observation], int]:
        """What follows `cursor`; everything before it is done with."""
        count = cursor - self._base
        if 0 < count <= len(self._seen):
            for observation in self._seen[:count]:
                if isinstance(observation, Beat):
                    self._beats.discard(observation.key)
                done(observation)
            del self._seen[:count]
            self._base = cursor
        return list(self._seen), self._base + len(self._seen)
