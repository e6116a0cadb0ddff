"""One attempt on Slurm, and the observations that its files and Slurm's word amount to.

The fast path is the run directory on the shared storage: start and end are in it at once.
Slurm's word comes by the sweep, and sooner when an end needs it (`verdict.needs_word`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from dure.adapters.compute.local.rundir import Exit, Status, Stop
from dure.adapters.compute.slurm import verdict
from dure.adapters.compute.slurm.parse import FINAL, Final, JobLine
from dure.adapters.compute.slurm.site import Launched, SharedRun, SlurmEnd
from dure.core.model import NodeHealth
from dure.ports import Clock, Freed, LeaseExpired, LeaseKey, LivePhase, Observation, Started


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """Times of this backend in seconds; tests shorten them."""

    query_s: float = 5.0
    poll_s: float = 0.2
    settle_s: float = 15.0
    """How long an end waits for Slurm's word, and Slurm's word for a file to appear."""
    start_s: float = 30.0
    """A Slurm job that runs this long counts as started, whatever its files say."""
    pending_s: float = 120.0
    """A launch that Slurm has not started by then goes back in line."""
    lost_kill_s: float = 30.0
    stop_margin_s: float = 30.0
    """After the time of SIGKILL: then Slurm itself is told to end the job."""
    beat_s: float = 15.0
    pause_s: float = 1.0
    """First pause after a command failed; it doubles up to `pause_max_s`."""
    pause_max_s: float = 30.0
    slow_s: float = 3.0
    """An answer that takes longer halves what is sent at a time."""


class Lease(msgspec.Struct, kw_only=True, eq=False):
    """A lease that is not collected yet. Times ending in `_at` are `time.monotonic()`."""

    key: LeaseKey
    launched: Launched
    run: SharedRun
    held_at: float
    started: bool = False
    exited: bool = False
    freed: bool = False
    fenced: bool = False
    last_ms: int = 0
    stop: Stop | None = None
    stop_at: float = 0.0
    signal_at: float = 0.0
    """When the stop is to be sent (again); 0: nothing to send."""
    state: str = ""
    """Slurm's state when last asked; empty: not known to Slurm, as far as we know."""
    running_ms: int | None = None
    final: Final | None = None
    final_at: float = 0.0
    end_at: float = 0.0
    """When the end was first seen in the files."""
    missed: int = 0
    beat_at: float = 0.0
    orphaned_ms: int = 0
    """When Slurm was found to have forgotten a job that had not ended; 0: it has not."""
    cancelled: bool = False
    """Given up by Dure itself before it started."""

    @property
    def phase(self) -> LivePhase:
        """What `leases()` answers."""
        if self.exited or self.freed:
            return LivePhase.ENDED
        return LivePhase.RUNNING if self.started else LivePhase.STARTING

    @property
    def slurm_id(self) -> int:
        """The Slurm job; 0: none that we know of."""
        return self.launched.slurm_id

    @property
    def holds(self) -> bool:
        """Whether Slurm may count GPUs of this lease as used."""
        return bool(self.slurm_id) and self.final is None

    def hear(self, line: JobLine) -> None:
        """Slurm's state of a job that has not ended."""
        self.missed = 0
        self.state = line.state
        if line.state not in FINAL and line.state not in ("PENDING", "CONFIGURING"):
            self.running_ms = self.running_ms or line.start_ms

    def settle(self, final: Final) -> None:
        """Slurm's last word."""
        if self.final is None:
            self.state, self.final, self.final_at = final.state, final, time.monotonic()

    @property
    def wants_word(self) -> bool:
        """Whether Slurm should be asked now and not at the next sweep."""
        return bool(self.end_at) and not self.exited and self.final is None


class Files(msgspec.Struct, frozen=True, kw_only=True):
    """What a run directory said at one moment."""

    end: Exit | None = None
    status: Status | None = None
    slurm_end: SlurmEnd | None = None


def read_files(lease: Lease) -> Files:
    """Look; shared storage may hang, so no lock is held meanwhile."""
    if lease.freed:
        return Files()
    end = lease.run.exit()
    # Read after the end: whoever has an end has its start on disk already.
    status = None if lease.started else lease.run.status()
    return Files(end=end, status=status, slurm_end=lease.run.slurm_end() if end else None)


class Story:
    """Turns what is known of a lease into observations, each once and in order."""

    def __init__(self, clock: Clock, durations: Durations) -> None:
        self._clock = clock
        self._durations = durations

    def advance(self, lease: Lease, files: Files) -> Iterator[Observation]:
        """What is new; whole if nothing is."""
        if lease.freed:
            return
        now = time.monotonic()
        end = files.end
        yield from self._start(lease, files)
        if not lease.exited:
            yield from self._end(lease, now, files)
        if not lease.exited:
            return
        if end is not None and end.freed is not None:
            lease.freed = True
            yield Freed(key=lease.key, at_ms=self._at(lease, end.freed.wall_ms))
        elif lease.final is not None or not lease.slurm_id:
            lease.freed = True
            yield Freed(key=lease.key, at_ms=self.now(lease))

    def _start(self, lease: Lease, files: Files) -> Iterator[Observation]:
        if lease.started or lease.exited:
            return
        status, running = files.status, lease.running_ms
        if status is not None:
            lease.started = True
            yield Started(key=lease.key, at_ms=self._at(lease, status.started.wall_ms))
        elif running is not None and files.end is None and self._late(running):
            # Its files are late or withheld: the GPUs are held since Slurm started it.
            lease.started = True
            yield Started(key=lease.key, at_ms=self._at(lease, running))

    def _late(self, running_ms: int) -> bool:
        return self._clock.now_ms() - running_ms >= self._durations.start_s * 1000

    def _end(self, lease: Lease, now: float, files: Files) -> Iterator[Observation]:
        if files.end is not None:
            yield from self._with_end(lease, now, files.end, files.slurm_end)
        elif lease.final is not None and now >= lease.final_at + self._patience_s(lease):
            stopped = lease.stop is not None
            lease.exited = True
            yield from verdict.without_end(
                lease.key, self.now(lease), lease.final, started=lease.started, stopped=stopped
            )

    def _with_end(
        self, lease: Lease, now: float, end: Exit, slurm_end: SlurmEnd | None
    ) -> Iterator[Observation]:
        if not lease.end_at:
            lease.end_at = now
        termed = slurm_end is not None and slurm_end.termed
        # The batch job's last words come just after the supervisor's: wait for them, shortly.
        unsure = slurm_end is None and now < lease.end_at + 1.0
        stopped = lease.stop is not None
        wait = verdict.needs_word(end, termed=termed or unsure, stopped=stopped)
        if wait and lease.final is None and now < lease.end_at + self._durations.settle_s:
            return
        lease.exited = True
        at_ms = self._at(lease, end.ended.wall_ms)
        if 0 < lease.orphaned_ms <= end.ended.wall_ms and not stopped:
            # Ended by the order that an orphan gets: it was lost before.
            yield LeaseExpired(key=lease.key, at_ms=at_ms, node_state=NodeHealth.STABLE)
            return
        yield verdict.with_end(lease.key, at_ms, end, lease.final, termed=termed, stopped=stopped)

    def _patience_s(self, lease: Lease) -> float:
        """Shared storage may show an end later than Slurm does."""
        if not lease.started and (lease.stop is not None or lease.cancelled):
            return 0.0
        if lease.orphaned_ms:
            # Its node has this long to find the order and to kill what is left.
            return self._durations.settle_s + self._durations.lost_kill_s + 2.0
        nothing_ran = lease.final is not None and lease.final.start_ms is None
        return 0.0 if nothing_ran else self._durations.settle_s

    def give_up(self, lease: Lease) -> Iterator[Observation]:
        """Nothing of it was ever given to Slurm: it is over at once."""
        if not lease.exited:
            lease.exited = True
            stopped = lease.stop is not None
            final = Final(state="CANCELLED")
            yield from verdict.without_end(
                lease.key, self.now(lease), final, started=False, stopped=stopped
            )
        if not lease.freed:
            lease.freed = True
            yield Freed(key=lease.key, at_ms=self.now(lease))

    def now(self, lease: Lease) -> int:
        """The time for something that is seen now."""
        return self._at(lease, self._clock.now_ms())

    def _at(self, lease: Lease, wall_ms: int) -> int:
        """A node's time, never before an earlier one of the lease and never in the future."""
        lease.last_ms = max(lease.last_ms, min(wall_ms, self._clock.now_ms()))
        return lease.last_ms
