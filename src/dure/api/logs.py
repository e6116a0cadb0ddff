"""The route of a job's output: a window of it, its last lines, or all that still comes.

Rule: a log is read in pieces, never as a whole, and a reader who waits costs one `pread`
each poll; the store is asked only when the world has seen an event.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import Receive, Scope, Send
from msgspec import Meta

from dure.api.routing import Api, Call, Reply, Routes, in_thread
from dure.core.errors import DureError, ErrorCode
from dure.core.model import TERMINAL, Attempt, JobId
from dure.engine import admin, queries
from dure.engine.engine import Engine
from dure.ports import LeaseKey

C = ErrorCode
routes = Routes("jobs")
PIECE = 65_536
WINDOW = 32 << 20
"""Most bytes of one answer that does not follow; the next offset says where to go on."""
POLL_S = 0.2
RECHECK_MS = 30_000
"""How long a stream may outlive the token that opened it."""


class LogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of a log: bytes from `offset`, of these the last `tail` lines."""

    attempt: Annotated[int, Meta(ge=1, le=2_147_483_647)] | None = None
    offset: Annotated[int, Meta(ge=0, le=9_223_372_036_854_775_807)] = 0
    tail: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    follow: bool = False


@routes.add(
    "GET",
    "/v1/jobs/{job}/logs",
    str,
    refuses=(C.FORBIDDEN, C.NOT_FOUND),
)
def read_log(call: Call, job: int, query: LogQuery) -> Reply:
    """Read a job's output; a job without one gives an empty text.

    Without `attempt` the newest is read, and `follow` goes on with later attempts; with it,
    only that one. An answer that does not follow has at most 32 MiB: go on at
    Dure-Log-Next-Offset.
    """
    engine = call.engine
    job_id = JobId(job)
    with engine.store.read() as tx:
        found = queries.seen(tx, call.actor, job_id)
        epoch = query.attempt or found.epoch
        attempt = tx.attempt(job_id, epoch) if epoch else None
    if query.attempt is not None and attempt is None:
        raise DureError(C.NOT_FOUND, kind="attempt", id=query.attempt)
    path = _path_of(engine, attempt)
    size = path.stat().st_size if path else 0
    start = min(query.offset, size)
    if query.tail is not None and path:
        start = max(start, _tail_start(path, size, query.tail))
    headers = {"dure-log-epoch": str(epoch)}
    if query.follow:
        tail = _Tail(call, job_id, epoch, start, only=query.attempt is not None)
        call.api.limiter.open_stream(call.key)
        return Reply(raw=_Followed(call.api, call.key, tail, headers))
    end = min(size, start + WINDOW)
    headers["dure-log-next-offset"] = str(end)
    body = _window(call.api, path, start, end)
    text = ASGIStreamingResponse(iterator=body, headers=headers, media_type="text/plain")
    return Reply(raw=text)


def _path_of(engine: Engine, attempt: Attempt | None) -> Path | None:
    """Local path of an attempt's log, if there is one to read."""
    if attempt is None:
        return None
    backend = engine.backend_of(attempt.placement.node)
    key = LeaseKey(job=attempt.job, epoch=attempt.epoch)
    path = backend.log_path(key) if backend is not None else None
    return Path(path) if path is not None and Path(path).is_file() else None


def _tail_start(path: Path, size: int, lines: int) -> int:
    """Byte at which the last `lines` lines begin, searched from the end in pieces."""
    if lines == 0:
        return size
    at = size
    wanted = lines
    with path.open("rb") as file:
        while at > 0:
            begin = max(0, at - PIECE)
            file.seek(begin)
            piece = file.read(at - begin)
            if at == size and piece.endswith(b"\n"):
                # The end of the last line begins no further one.
                wanted += 1
            ends = piece.count(b"\n")
            if ends >= wanted:
                cut = len(piece)
                for _ in range(wanted):
                    cut = piece.rindex(b"\n", 0, cut)
                return begin + cut + 1
            wanted -= ends
            at = begin
    return 0


async def _window(api: Api, path: Path | None, start: int, end: int) -> AsyncIterator[bytes]:
    if path is None or start >= end:
        return
    fd = await in_thread(api, partial(os.open, path, os.O_RDONLY | os.O_CLOEXEC))
    try:
        while start < end:
            read = partial(os.pread, fd, min(PIECE, end - start), start)
            piece = await in_thread(api, read)
            if not piece:
                return
            start += len(piece)
            yield piece
    finally:
        os.close(fd)


# -- following -----------------------------------------------------------------------


class _Tail:
    """Reads one job's output piece by piece, from attempt to attempt."""

    def __init__(self, call: Call, job: JobId, epoch: int, offset: int, *, only: bool) -> None:
        self._call = call
        self._job = job
        self._epoch = epoch
        self._offset = offset
        self._only = only
        self._fd = -1
        self._attempt: Attempt | None = None
        self._newest = epoch
        self._ended = False
        self._over = False
        self._seen = -1
        self._checked_ms = call.engine.clock.now_ms()
        self.done = False

    def read(self) -> bytes:
        """Read what there is; empty when nothing new has come (`done`: ever will)."""
        self._look()
        while True:
            # Whether the attempt was over is known before its end is read: nothing is lost.
            over = self._over
            piece = self._piece()
            if piece:
                self._offset += len(piece)
                return piece
            if not over:
                return b""
            if self._only or self._epoch >= self._newest:
                self.done = self._only or self._ended
                return b""
            self._next()

    def _look(self) -> None:
        """Ask the store, if anything at all has happened since it was asked."""
        engine = self._call.engine
        now_ms = engine.clock.now_ms()
        if now_ms - self._checked_ms > RECHECK_MS:
            self._checked_ms = now_ms
            self._recheck()
        event_id = engine.world.last_event_id
        if event_id == self._seen:
            return
        with engine.store.read() as tx:
            job = tx.job(self._job)
            self._attempt = tx.attempt(self._job, self._epoch) if self._epoch else None
        self._seen = event_id
        self._newest = job.epoch if job is not None else self._epoch
        self._ended = job is None or job.state in TERMINAL
        done = self._attempt is None or self._attempt.outcome is not None
        self._over = done or self._newest > self._epoch or self._ended

    def _recheck(self) -> None:
        """End a stream whose reader's token was revoked or may not read this any more."""
        header = self._call.headers.get("authorization", "")
        user = admin.authenticate(self._call.engine, header.strip().partition(" ")[2].strip())
        with self._call.engine.store.read() as tx:
            queries.seen(tx, user, self._job)

    def _next(self) -> None:
        self.close()
        self._epoch += 1
        self._offset = 0
        self._over = False
        self._seen = -1
        self._look()

    def _piece(self) -> bytes:
        if self._fd < 0:
            path = _path_of(self._call.engine, self._attempt)
            if path is None:
                return b""
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._fd, PIECE, self._offset)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Followed(ASGIStreamingResponse):
    """A stream that gives its place back however it ends."""

    def __init__(self, api: Api, key: str, tail: _Tail, headers: dict[str, str]) -> None:
        super().__init__(iterator=self._pieces(api, tail), headers=headers, media_type="text/plain")
        self._api = api
        self._key = key
        self._tail = tail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._api.limiter.close_stream(self._key)

    @staticmethod
    async def _pieces(api: Api, tail: _Tail) -> AsyncIterator[bytes]:
        try:
            while not api.stopping.is_set():
                try:
                    piece = await in_thread(api, tail.read)
                except DureError:
                    # The head was sent long ago: all that is left is to end.
                    return
                if piece:
                    yield piece
                elif tail.done:
                    return
                else:
                    await asyncio.sleep(POLL_S)
        finally:
            tail.close()
