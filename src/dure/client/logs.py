"""A job's output as it appears, over dropped connections and from attempt to attempt.

Rule: the position is a byte offset in the log of one epoch, so after any interruption
reading goes on exactly where it stopped: nothing twice, nothing lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, NamedTuple

from dure.client.errors import ApiError, ClientError, Unreachable
from dure.core.model import ACTIVE, TERMINAL
from dure.wire import JobOut

if TYPE_CHECKING:
    from dure.client.session import Client

PATIENCE_S = 300.0
"""How long a server may be away before following or waiting for a job gives up."""
SHORTEST_POLL_S = 0.5
LONGEST_POLL_S = 5.0
PIECE = 65_536

OnIdle = Callable[[JobOut], None]


class LogChunk(NamedTuple):
    """Bytes of the log of one epoch; reading goes on at `next_offset`."""

    data: bytes
    epoch: int
    next_offset: int


class LogLine(NamedTuple):
    """A line without its end, and the epoch (dispatch) that printed it."""

    text: str
    epoch: int


class Patience:
    """Lets a server be away for a while; after that its error is the caller's."""

    def __init__(
        self, limit_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._since: float | None = None
        self.pause_s = SHORTEST_POLL_S

    def answered(self) -> None:
        """Forget earlier failures."""
        self._since = None

    def failed(self, error: ClientError) -> None:
        """Bear it, or raise it when it lasts too long or repeating cannot help."""
        if isinstance(error, ApiError) and not _passes(error):
            raise error
        now = self._clock()
        self._since = self._since if self._since is not None else now
        if now - self._since > self._limit_s:
            raise error

    def hurry(self) -> None:
        """Look again soon: something has just happened."""
        self.pause_s = SHORTEST_POLL_S

    def next_pause_s(self) -> float:
        """Return a pause that grows while nothing happens."""
        pause, self.pause_s = self.pause_s, min(LONGEST_POLL_S, self.pause_s * 1.5)
        return pause


def _passes(error: ApiError) -> bool:
    return error.status >= 500 or (error.status == 429 and error.code != "QUEUE_LIMIT")


class Follower:
    """Yields what a job prints until the job, or the one attempt asked for, has ended."""

    def __init__(
        self,
        client: Client,
        job_id: int,
        *,
        attempt: int | None = None,
        on_idle: OnIdle | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._id = job_id
        self._only = attempt
        self._on_idle = on_idle
        self._pause = pause
        self._patience = Patience()
        self._epoch = attempt or 0
        self._offset = 0

    def chunks(self, offset: int = 0, tail: int | None = None) -> Iterator[LogChunk]:
        """Follow from `offset`, or from the last `tail` lines of what is there already."""
        self._offset = offset
        if tail is not None:
            first = self._client.read_log(self._id, tail=tail, attempt=self._only)
            self._epoch, self._offset = first.epoch, first.next_offset
            if first.data:
                yield first
        while True:
            job = self._job()
            if job is not None:
                done = yield from self._advance(job)
                if done:
                    return
            self._pause(self._patience.next_pause_s())

    def _advance(self, job: JobOut) -> Generator[LogChunk, None, bool]:
        """Read what there is; return whether everything was read."""
        self._epoch = self._epoch or min(job.epoch, 1)
        over = job.state in TERMINAL or job.epoch > self._epoch
        if self._epoch and (over or job.state in ACTIVE):
            whole = yield from self._read(follow=not over)
            if over and not whole:
                return False
        if job.epoch > self._epoch and self._only is None:
            self._epoch, self._offset = self._epoch + 1, 0
            self._patience.hurry()
        elif over:
            return True
        elif self._on_idle is not None and job.state not in ACTIVE:
            self._on_idle(job)
        return False

    def _job(self) -> JobOut | None:
        try:
            job = self._client.job_out(self._id)
        except (ApiError, Unreachable) as error:
            self._patience.failed(error)
            return None
        self._patience.answered()
        return job

    def _read(self, *, follow: bool) -> Generator[LogChunk, None, bool]:
        """Read on; return whether the end was reached without an interruption."""
        source = self._streamed() if follow else self._stored()
        try:
            for chunk in source:
                self._offset = chunk.next_offset
                self._patience.hurry()
                yield chunk
        except ApiError as error:
            if follow and error.status == 429:
                # Too many open streams: look now and then instead.
                return (yield from self._read(follow=False))
            if error.status != 404:  # an attempt that never started has no log
                self._patience.failed(error)
                return False
        except Unreachable as error:
            self._patience.failed(error)
            return False
        return True

    def _streamed(self) -> Iterator[LogChunk]:
        with self._client.open_log(self._id, offset=self._offset, attempt=self._epoch) as response:
            at = self._offset
            while data := response.read1(PIECE):
                at += len(data)
                yield LogChunk(data, self._epoch, at)

    def _stored(self) -> Iterator[LogChunk]:
        while True:
            chunk = self._client.read_log(self._id, offset=self._offset, attempt=self._epoch)
            if not chunk.data:
                return
            yield chunk


def lines(chunks: Iterator[LogChunk]) -> Iterator[LogLine]:
    """Cut chunks into lines; what an attempt printed last needs no line end."""
    rest, epoch = b"", 0
    for chunk in chunks:
        if chunk.epoch != epoch:
            if rest:
                yield LogLine(rest.decode(errors="replace"), epoch)
            rest, epoch = b"", chunk.epoch
        *whole, rest = (rest + chunk.data).split(b"\n")
        for line in whole:
            yield LogLine(line.decode(errors="replace").rstrip("\r"), epoch)
    if rest:
        yield LogLine(rest.decode(errors="replace"), epoch)
