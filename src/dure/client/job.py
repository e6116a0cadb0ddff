"""A job in the hand of the one who submitted it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from dure.client.errors import ApiError, Unreachable, WaitTimeout, ending
from dure.client.logs import Follower, LogLine, Patience, lines
from dure.client.quantities import seconds
from dure.core.model import TERMINAL, JobState
from dure.wire import AttemptOut, JobOut, WhyOut

if TYPE_CHECKING:
    from dure.client.session import Client


class Job:
    """A job as last seen in `info`; `refresh()` looks again."""

    def __init__(self, client: Client, info: JobOut) -> None:
        self._client = client
        self.info = info

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.info.name!r} {self.state.value}>"

    @property
    def id(self) -> int:
        """Number of the job."""
        return self.info.id

    @property
    def state(self) -> JobState:
        """State when last looked at."""
        return self.info.state

    @property
    def ended(self) -> bool:
        """Whether it was over when last looked at."""
        return self.info.state in TERMINAL

    def refresh(self) -> Job:
        """Look again."""
        self.info = self._client.job_out(self.id)
        return self

    def why(self) -> WhyOut:
        """Why it waits: reason, rank, and the placements considered."""
        return self._client.why(self.id)

    def attempts(self) -> list[AttemptOut]:
        """All dispatches, oldest first."""
        return self._client.attempts(self.id)

    def cancel(self) -> Job:
        """Ask it to stop; `info.cancel` then says until when it may save."""
        return self._act("cancel")

    def hold(self) -> Job:
        """Keep it from taking its turn."""
        return self._act("hold")

    def release(self) -> Job:
        """Let a held job take its turn."""
        return self._act("release")

    def retry(self) -> Job:
        """Queue a failed job again under its own number."""
        return self._act("retry")

    def rerun(self) -> Job:
        """Submit the same request as a new job."""
        return self._client.rerun(self.id)

    def _act(self, action: str) -> Job:
        self.info = self._client.act(self.id, action)
        return self

    def logs(
        self, *, follow: bool = False, tail: int | None = None, attempt: int | None = None
    ) -> Iterator[LogLine]:
        """Lines printed so far; with `follow` also those to come, over all attempts.

        Following survives dropped connections and ends with the job. `attempt` is an
        epoch of `attempts()`; without it and without `follow`, the newest one is read.
        """
        if follow:
            follower = Follower(self._client, self.id, attempt=attempt)
            return lines(follower.chunks(tail=tail))
        return lines(self._client.log_chunks(self.id, tail=tail, attempt=attempt))

    def wait(self, timeout: str | float | timedelta | None = None) -> Job:
        """Return when the job has completed.

        Raises JobFailed, OutOfMemory, JobCancelled, JobTimedOut or JobDead when it ended
        otherwise, WaitTimeout when `timeout` (`"6h"` or seconds) passes first. A server
        that is away for some minutes is waited for.
        """
        until = None if timeout is None else time.monotonic() + seconds(timeout)
        patience = Patience()
        while True:
            try:
                self.refresh()
                patience.answered()
            except (ApiError, Unreachable) as error:
                patience.failed(error)
            if self.ended:
                break
            pause_s = patience.next_pause_s()
            if until is not None:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise WaitTimeout(self.info)
                pause_s = min(pause_s, left_s)
            time.sleep(pause_s)
        bad = ending(self.info)
        if bad is not None:
            raise bad
        return self
