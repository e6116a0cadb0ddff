"""The sampling thread: a warm first sample, one per interval, a last one at the stop."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from dure_sdk.names import PREFIX, Renamed
from dure_sdk.notices import Causes, say, warn
from dure_sdk.sender import Sample

if (
    TYPE_CHECKING
):  # loaded by the sampling thread: the caller of enable_system_metrics does not wait
    from collections.abc import Mapping

    from dure_sdk.collectors import Built

WARM_S = 0.25
"""Between the reading that primes psutil's and the cgroup's counters and the first sample."""
LOOK_S = 1.0
MB = 1e6


class NothingToCollectError(Exception):
    """No collector could be made; the text says why."""


class Plan(NamedTuple):
    """What the thread is told to do."""

    interval_s: float
    samples: int
    where: str
    """For the line that tells what is collected."""
    over: Callable[[], bool]
    """Whether the program has ended the run without telling us."""
    keep: Callable[[Built, Mapping[str, float]], dict[str, float]] | None = None
    """Which of the collected series this worker shows."""
    rest: bool = False
    """Whether this worker shows only what the first one of its node does not."""


class Monitor:
    """Samples in one thread, because psutil keeps its CPU counters per thread."""

    def __init__(
        self,
        plan: Plan,
        make: Callable[[], Built],
        put: Callable[[Sample], None],
        tag: Callable[[dict[str, str]], None],
        write_words: Callable[[Mapping[str, Any]], None],
        started: Callable[[Built], None],
        causes: Causes,
    ) -> None:
        self._plan = plan
        self._make = make
        self._put = put
        self._tag = tag
        self._words = write_words
        self._started = started
        self._causes = causes
        self._stop = threading.Event()
        self._built: Built | None = None
        self._kills_before: int | None = None
        self._thread = threading.Thread(target=self._run, name="dure-monitor", daemon=True)
        self.points = 0

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still samples."""
        return self._thread.is_alive()

    def stop(self, limit_s: float) -> bool:
        """Take the last sample and end; True if it ended in time."""
        self._stop.set()
        self._thread.join(max(limit_s, 0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except NothingToCollectError as error:
            warn(f"no system metrics: {error}")
            self._tag({"dure.sysmetrics.skipped": str(error)})
        except Exception as error:  # noqa: BLE001 - the thread's top: told, and training goes on
            warn(f"system metrics stop: {error!r}")
            self._tag({"dure.sysmetrics.skipped": repr(error)[:200]})
        finally:
            for aside in self._built.apart if self._built else ():
                aside.close()

    def _sample_until_stopped(self) -> None:
        self._built = built = self._make()
        self._kills_before = self._kills()
        self._collect(built.monitors)
        for monitor in built.monitors:
            monitor.clear_metrics()
        self._stop.wait(WARM_S)
        self._collect(built.monitors)
        self._publish(built)
        self._started(built)
        last_s = time.monotonic()
        if self._plan.rest and not self.points:
            return  # the first worker of this node shows everything that this one could
        due_s = last_s + self._plan.interval_s
        count = 0
        while not self._over_before(due_s):
            self._collect(built.monitors)
            count += 1
            if count == self._plan.samples:
                self._publish(built)
                count = 0
            last_s = time.monotonic()
            # After a long pause of the process: no burst of samples for what was missed.
            due_s = max(due_s + self._plan.interval_s, last_s)
        if count or time.monotonic() - last_s >= min(WARM_S, self._plan.interval_s / 2):
            self._collect(built.monitors)
            self._publish(built)
        self._tag(self._verdict(built))
        self._words(self._said(built, ended=True))

    def _over_before(self, due_s: float) -> bool:
        """Wait until `due_s`; True if the end came first, also one that MLflow alone was told."""
        while (left_s := due_s - time.monotonic()) > 0:
            if self._stop.wait(min(left_s, LOOK_S)) or self._plan.over():
                return True
        return self._stop.is_set()

    def _collect(self, monitors: list[Renamed]) -> None:
        for monitor in monitors:
            try:
                monitor.collect_metrics()
            except Exception as error:  # noqa: BLE001, PERF203 - the others go on
                self._failed(monitor, error)

    def _failed(self, monitor: Renamed, error: Exception) -> None:
        words = str(error) or type(error).__name__
        self._causes.warn(
            f"{monitor.name} {type(error).__name__} {words}",
            f"collector {monitor.name} failed: {words}; the others go on",
        )

    def _publish(self, built: Built) -> None:
        values: dict[str, float] = {}
        for monitor in built.monitors:
            try:
                values.update(monitor.aggregate_metrics())
            except Exception as error:  # noqa: BLE001 - as above
                self._failed(monitor, error)
            monitor.clear_metrics()
        kept = {k: v for k, v in values.items() if _finite(v)}
        if self._plan.keep is not None:
            kept = self._plan.keep(built, kept)
        if kept:
            named = {PREFIX + key: float(value) for key, value in kept.items()}
            self._put(Sample(_now_ms(), self.points, named))
            self.points += 1
        if self.points == 1 and kept:
            say(f"{self._plan.where}: {len(kept)} series every {self._plan.interval_s:g} s")
        self._words(self._said(built))

    def _said(self, built: Built, *, ended: bool = False) -> dict[str, Any]:
        """What the last-words file says after this sample."""
        said: dict[str, Any] = {"time_ms": _now_ms(), "points": self.points, "ended": ended}
        if built.gpu is not None:
            said["gpus"] = [gpu.uuid for gpu in built.gpu.gpus.values()]
        if built.cgroup is not None:
            said.update(built.cgroup.facts())
            said["oom_kills_before"] = self._kills_before
        return said

    def _kills(self) -> int | None:
        return self._built.cgroup.oom_kills() if self._built and self._built.cgroup else None

    def _verdict(self, built: Built) -> dict[str, str]:
        """Tags of the end: what the kernel counted, and the two peaks, which are two facts."""
        tags: dict[str, str] = {}
        if built.cgroup is None:
            return tags
        kills = self._kills()
        if kills is not None:
            tags["oom_kill"] = str(max(kills - (self._kills_before or 0), 0))
        if built.cgroup.peak_bytes:
            tags["mem_peak_sampled_mb"] = f"{built.cgroup.peak_bytes / MB:.1f}"
        peak = built.cgroup.kernel_peak_bytes()
        if peak is not None:
            tags["mem_peak_mb"] = f"{peak / MB:.1f}"
        return tags


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _now_ms() -> int:
    return int(time.time() * 1000)
