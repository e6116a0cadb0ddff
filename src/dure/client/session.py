"""`Client`: every call of the HTTP API as a typed method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from dure import wire
from dure.client.calls import decode, new_key, query_of
from dure.client.job import Job
from dure.client.logs import LogChunk
from dure.client.site_calls import PAGE, SiteCalls
from dure.client.submission import request_of
from dure.core.model import JobState

if TYPE_CHECKING:
    from http.client import HTTPResponse


class Client(SiteCalls):
    """Talks to one Dure server.

    Address and token come from the arguments, DURE_URL and DURE_TOKEN, or the profile that
    `dure login` saved. Close it, or use it in a `with` block.
    """

    def submit(
        self,
        command: Sequence[str],
        *,
        gpus: int = 1,
        min_vram: str | float = 0,
        tiers: Sequence[str] = (),
        node: str | None = None,
        time: str | float | timedelta | None = None,
        name: str = "",
        lab: str | None = None,
        env: Mapping[str, str] | None = None,
        retry: int | None = None,
        retry_on: str = "loss",
        oom_escalate: bool = True,
        idempotent: bool = False,
        signal: str | None = None,
        not_before: str | float | datetime | None = None,
        workdir: str | None = None,
        labels: Mapping[str, str] | None = None,
        hold: bool = False,
        key: str | None = None,
    ) -> Job:
        """Submit a command; see `request_of` for what the arguments accept.

        The request carries an Idempotency-Key, so a lost connection never makes two jobs;
        give `key` to make the same true of repeated calls.
        """
        asked = request_of(
            command,
            gpus=gpus,
            min_vram=min_vram,
            tiers=tiers,
            node=node,
            time=time,
            name=name,
            lab=lab,
            env=env,
            retry=retry,
            retry_on=retry_on,
            oom_escalate=oom_escalate,
            idempotent=idempotent,
            signal=signal,
            not_before=not_before,
            workdir=workdir,
            labels=labels,
            hold=hold,
        )
        return self.submit_request(asked, key=key)

    def submit_request(self, asked: wire.JobIn, *, key: str | None = None) -> Job:
        """Submit a request that is ready."""
        reply = self.send("POST", "/v1/jobs", asked, key=key or new_key())
        return Job(self, decode(reply, wire.JobOut))

    def preview(self, asked: wire.JobIn) -> wire.PreviewOut:
        """Say what would happen, without submitting."""
        return self._write(wire.PreviewOut, "POST", "/v1/submit/preview", asked)

    def job(self, job_id: int) -> Job:
        """Look at one job."""
        return Job(self, self.job_out(job_id))

    def job_out(self, job_id: int) -> wire.JobOut:
        """One job as the API tells it."""
        return self._get(wire.JobOut, f"/v1/jobs/{int(job_id)}")

    def jobs(
        self,
        *,
        state: Sequence[JobState | str] = (),
        user: str | None = None,
        lab: str | None = None,
        name: str | None = None,
        mine: bool = False,
        since_ms: int | None = None,
        limit: int | None = 50,
    ) -> list[Job]:
        """List the newest `limit` jobs that match (all with None), newest first."""
        query: dict[str, object] = {
            "state": [str(s) for s in state],
            "user": user,
            "lab": lab,
            "name": name,
            "mine": "true" if mine else None,
            "since_ms": since_ms,
        }
        found: list[Job] = []
        cursor: str | None = None
        while limit is None or len(found) < limit:
            size = PAGE if limit is None else min(PAGE, limit - len(found))
            page = self._get(wire.JobPage, "/v1/jobs", limit=size, cursor=cursor, **query)
            found += [Job(self, item) for item in page.items]
            cursor = page.next
            if cursor is None or not page.items:
                break
        return found

    def act(self, job_id: int, action: str) -> wire.JobOut:
        """Cancel, hold, release or retry a job."""
        return self._write(wire.JobOut, "POST", f"/v1/jobs/{int(job_id)}/{action}")

    def rerun(self, job_id: int, *, key: str | None = None) -> Job:
        """Submit the same request as a new job."""
        reply = self.send("POST", f"/v1/jobs/{int(job_id)}/rerun", key=key or new_key())
        return Job(self, decode(reply, wire.JobOut))

    def edit(self, job_id: int, patch: wire.JobPatch) -> wire.JobOut:
        """Change what may change of a job."""
        return self._write(wire.JobOut, "PATCH", f"/v1/jobs/{int(job_id)}", patch)

    def why(self, job_id: int) -> wire.WhyOut:
        """Why a job waits."""
        return self._get(wire.WhyOut, f"/v1/jobs/{int(job_id)}/why")

    def attempts(self, job_id: int) -> list[wire.AttemptOut]:
        """All dispatches of a job, oldest first."""
        return self._get(wire.AttemptList, f"/v1/jobs/{int(job_id)}/attempts").items

    def events(self, job_id: int) -> list[wire.EventOut]:
        """What happened to a job, in order."""
        found: list[wire.EventOut] = []
        cursor: str | None = None
        while True:
            path = f"/v1/jobs/{int(job_id)}/events"
            page = self._get(wire.EventPage, path, cursor=cursor)
            found += page.items
            cursor = page.next
            if cursor is None or not page.items:
                return found

    # -- logs --

    def read_log(
        self,
        job_id: int,
        *,
        offset: int | None = None,
        tail: int | None = None,
        attempt: int | None = None,
    ) -> LogChunk:
        """Read what is there from a byte `offset`, or the last `tail` lines."""
        query = query_of({"offset": offset, "tail": tail, "attempt": attempt})
        reply = self.send("GET", f"/v1/jobs/{int(job_id)}/logs{query}")
        epoch = int(reply.headers.get("dure-log-epoch", attempt or 0))
        behind = (offset or 0) + len(reply.body)
        following = int(reply.headers.get("dure-log-next-offset", behind))
        return LogChunk(reply.body, epoch, following)

    def log_chunks(
        self, job_id: int, *, tail: int | None = None, attempt: int | None = None
    ) -> Iterator[LogChunk]:
        """Read everything there is now, of one attempt (the newest unless given)."""
        start = 0 if tail is None else None
        chunk = self.read_log(job_id, offset=start, tail=tail, attempt=attempt)
        while chunk.data:
            yield chunk
            chunk = self.read_log(job_id, offset=chunk.next_offset, attempt=chunk.epoch)

    def open_log(
        self, job_id: int, *, offset: int, attempt: int
    ) -> AbstractContextManager[HTTPResponse]:
        """Open the stream of one attempt's log from a byte `offset`."""
        query = query_of({"offset": offset, "attempt": attempt, "follow": "true"})
        return self._transport.stream(f"{self._base}/v1/jobs/{int(job_id)}/logs{query}")
