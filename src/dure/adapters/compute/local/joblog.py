"""What a job prints, from a pipe into the file `log`, up to a limit.

Rule: standard library only, syntax of Python 3.9: the supervisor imports it. A pipe, because
nothing else keeps one file of a job small while its other files may be large. Beyond the
limit the job goes on and what it prints is dropped.
"""

# ruff: noqa: SIM105 - contextlib costs time at each start

from __future__ import annotations

import fcntl
import os

PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 18
READS = 16
SET_PIPE_SIZE = 1031
"""F_SETPIPE_SZ: a job that prints much must not wait for each of its lines."""


class JobLog:
    """The file, and once `pipe` was called the end of a pipe to read from."""

    def __init__(self, limit_mib: int) -> None:
        self.limit = limit_mib << 20
        self.fd = self._open()
        self.size = os.fstat(self.fd).st_size
        self.source = -1
        self.full = False

    @staticmethod
    def _open() -> int:
        return os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def pipe(self, uid: int) -> int:
        """A new pipe; the end for the job, whom it belongs to."""
        self.source, into = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.source, False)
        try:
            fcntl.fcntl(into, SET_PIPE_SIZE, PIPE_BYTES)
        except OSError:
            pass  # more than this user's pipes may hold
        if uid:
            os.fchown(into, uid, uid)  # else the job could not open /dev/stdout
        return into

    def pump(self) -> bool:
        """Write down what has come; False when no process holds the other end."""
        for _ in range(READS):  # a flood must not keep the supervisor from its clocks
            if self.source < 0:
                return False
            try:
                data = os.read(self.source, READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                os.close(self.source)
                self.source = -1
                return False
            self._keep(data)
        return True

    def _keep(self, data: bytes) -> None:
        left = self.limit - self.size if self.limit else len(data)
        if left >= len(data):
            self._write(data)
        elif not self.full:
            self.full = True
            self._write(data[:left])
            size = self.limit >> 20
            self.say(f"the log reached its limit of {size} MiB; the rest is missing")

    def say(self, sentence: str) -> None:
        """A line of Dure's own."""
        self._write(
            f"\ndure: {sentence}\n".encode() if self.size else f"dure: {sentence}\n".encode()
        )

    def _write(self, data: bytes) -> None:
        try:
            while data:
                done = os.write(self.fd, data)
                self.size += done
                data = data[done:]
        except OSError:
            return  # a full disk: the job must not stop for what it prints
