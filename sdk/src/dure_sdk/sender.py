"""A bounded buffer and the one thread that writes it to MLflow.

Rule: nothing here ever waits in the thread that trains, and no sample is lost while the server is
away and room is left. When the buffer is full, every second sample goes, evenly over the whole
time: a coarse picture of all of it says more than a fine one of a part.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from dure_sdk.notices import Causes, say, warn
from dure_sdk.transport import BATCH_MAX, AwayError, Metric, RefusedError

HANGS_S = 0.5
"""At the end: a request this old is not waited for alone, a second one is sent beside it."""


class Pace(NamedTuple):
    """All durations of the sender, in seconds, and its size."""

    send_every_s: float = 10.0
    """Samples that are closer together travel together: a request costs more than a sample."""
    timeout_s: float = 4.0
    timeout_max_s: float = 30.0
    """A slow server is given more time at each time-out, up to this."""
    retry_s: float = 1.0
    retry_max_s: float = 8.0
    """Short, so that a job that ends soon after an outage still brings its samples home."""
    last_try_s: float = 4.0
    """At the end: how long without any progress until the rest is given up."""
    samples_max: int = 4096


class Sample(NamedTuple):
    """All series of one collector at one time; `step` counts from this monitor's start."""

    timestamp_ms: int
    step: int
    values: dict[str, float]


class Sender:
    """Takes samples and tags from any thread and writes them from its own."""

    def __init__(
        self, transport: Any, suffix: str, causes: Causes, pace: Pace | None = None
    ) -> None:
        self._transport = transport
        self._suffix = suffix
        self._causes = causes
        self._pace = pace = pace or Pace()
        self._samples: list[Sample] = []
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._closing = False
        self._ended = False
        self._in_request = False
        self._taken_over = False
        self._step_base: int | None = None
        self._stride = 2
        self._flying = 0
        self._away_since_s: float | None = None
        self._timeout_s = pace.timeout_s
        self._moved_s = time.monotonic()
        self._tried_s = float("-inf")
        self.sent = 0
        self.dropped = 0
        self.tags_lost = 0
        self._thread = threading.Thread(target=self._run, name="dure-sender", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    @property
    def away(self) -> bool:
        """Whether the server did not answer the last time."""
        return self._away_since_s is not None

    @property
    def left(self) -> int:
        """Samples that wait."""
        return len(self._samples)

    def put(self, sample: Sample) -> None:
        """Take one sample. Never waits for the server."""
        with self._lock:
            if self._ended:
                return
            if len(self._samples) >= self._pace.samples_max:
                self._thin()
            self._samples.append(sample)
        if time.monotonic() - self._tried_s >= 0.9 * self._pace.send_every_s:
            self._wake.set()

    def tag(self, tags: dict[str, str]) -> None:
        """Take tags; a later value of a key replaces an earlier one."""
        with self._lock:
            self._tags.update(tags)
        self._wake.set()

    def close(self, limit_s: float) -> bool:
        """Send what is left and stop; True if nothing stayed behind.

        Gives up at `limit_s`, and before it when the server makes no progress for `last_try_s`:
        a job's GPUs are not held for a server that is away.
        """
        deadline_s = time.monotonic() + limit_s
        self._moved_s = time.monotonic()
        self._closing = True
        self._wake.set()
        while not self._idle.wait(0.02):
            now_s = time.monotonic()
            if self._in_request and now_s - self._tried_s > HANGS_S and not self._taken_over:
                # It may hang since an outage began, while the server is back: ask it anew.
                self._taken_over = True
                threading.Thread(target=self._finish, name="dure-sender", daemon=True).start()
            if now_s >= deadline_s or now_s - self._moved_s > self._pace.last_try_s:
                break
        with self._lock:
            self._ended = True
            self.tags_lost += len(self._tags)
            return not self._samples and not self._tags

    def _thin(self) -> None:
        first = max(self._flying, 1)  # what is on its way is not dropped
        head, rest = self._samples[:first], self._samples[first:]
        enough = self._pace.samples_max * 3 // 4
        while len(head) + len(rest) > enough and len(rest) > 1:
            rest = [s for s in rest[:-1] if s.step % self._stride == 0] + rest[-1:]
            self._stride *= 2 if len(head) + len(rest) > enough else 1
        self.dropped += len(self._samples) - len(head) - len(rest)
        self._samples = head + rest
        self._causes.warn("buffer", "the buffer is full: every second waiting sample was dropped")

    def _run(self) -> None:
        """The loop: wait, send all there is, back off while the server is away."""
        retry_s = self._pace.retry_s
        while not self._ended and not self._closing:
            if not self.away:
                self._wake.wait(self._pace.send_every_s)
            self._wake.clear()
            if self._attempt():
                retry_s = self._pace.retry_s
            else:
                self._pause(retry_s)
                retry_s = min(retry_s * 2, self._pace.retry_max_s)
        if not self._taken_over:
            self._finish()

    def _finish(self) -> None:
        """The last try: one that began after the stop was asked for."""
        self._attempt()
        self._idle.set()

    def _attempt(self) -> bool:
        try:
            self._send_all()
        except AwayError as error:
            self._gone(error)
            return False
        except Exception as error:  # noqa: BLE001 - the loop's top: told once, tried again
            self._causes.warn(f"send {error!r}", f"samples could not be sent: {error!r}")
            return False
        return True

    def _pause(self, seconds_s: float) -> None:
        end_s = time.monotonic() + seconds_s
        while not self._closing and time.monotonic() < end_s:
            time.sleep(min(0.1, max(end_s - time.monotonic(), 0)))

    def _send_all(self) -> None:
        while not self._ended and (self._samples or self._tags):
            if self._step_base is None:
                self._step_base = self._next_step()
                continue  # the run may have turned out to be gone
            with self._lock:
                batch = self._batch()
                self._flying = len(batch)
                tags = dict(self._tags)
            self._send(batch, tags)
            with self._lock:
                self._flying = 0
                gone = set(map(id, batch))
                self._samples = [s for s in self._samples if id(s) not in gone]
                for key, value in tags.items():
                    if self._tags.get(key) == value:
                        del self._tags[key]
            self._moved_s = time.monotonic()

    def _batch(self) -> list[Sample]:
        """The oldest samples that fit into one request, at least one."""
        size = 0
        batch: list[Sample] = []
        for sample in self._samples:
            size += len(sample.values)
            if batch and size > BATCH_MAX:
                break
            batch.append(sample)
        return batch

    def _send(self, batch: list[Sample], tags: dict[str, str]) -> None:
        base = self._step_base or 0
        metrics = [
            Metric(key, value, sample.timestamp_ms, base + sample.step)
            for sample in batch
            for key, value in sample.values.items()
        ]
        try:
            self._log(metrics, tags)
        except RefusedError as error:
            if error.final or not tags:
                self._refused(batch, error)
                return
            self.tags_lost += len(tags)
            try:  # the tags may be what was refused
                self._log(metrics, {})
            except RefusedError as again:
                self._refused(batch, again)
                return
        self.sent += len(batch)

    def _log(self, metrics: list[Metric], tags: dict[str, str]) -> None:
        self._try(lambda timeout_s: self._transport.log(metrics, tags, timeout_s))

    def _next_step(self) -> int:
        try:
            return int(self._try(lambda t: self._transport.next_step(self._suffix, t)))
        except RefusedError as error:
            self._refused([], error)
            return 0

    def _try(self, call: Any) -> Any:
        """One request; afterwards it is known whether the server is there."""
        limit_s = min(self._timeout_s, self._pace.last_try_s) if self._closing else self._timeout_s
        self._tried_s = began_s = time.monotonic()
        self._in_request = True
        try:
            result = call(limit_s)
        except AwayError:
            if time.monotonic() - began_s >= limit_s:
                self._timeout_s = min(self._timeout_s * 2, self._pace.timeout_max_s)
            raise
        except RefusedError:
            self._back()
            raise
        finally:
            self._in_request = False
        self._back()
        return result

    def _refused(self, batch: list[Sample], error: RefusedError) -> None:
        self.dropped += len(batch)
        if not error.final:
            self._causes.warn("refused", f"MLflow refused a batch of samples: {error}")
            return
        with self._lock:
            self._ended = True
            self.dropped += len(self._samples)
            self._samples, self._tags = [], {}
        warn(f"the run takes no more system metrics, they stop: {error}")

    def _gone(self, error: AwayError) -> None:
        if self._away_since_s is None:
            self._away_since_s = time.monotonic()
            say(f"MLflow does not answer; samples are kept and sent later ({error})")

    def _back(self) -> None:
        if self._away_since_s is not None:
            away_s = time.monotonic() - self._away_since_s
            self._away_since_s = None
            self._timeout_s = self._pace.timeout_s
            say(f"MLflow answers again after {away_s:.0f} s; {self.left} samples follow")
