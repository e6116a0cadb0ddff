"""A private Redis of Debian's package, and queues of both kinds with what a test needs."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis

from dure.adapters.clock import ManualClock
from dure.adapters.lease.memory import MemoryLeaseQueue
from dure.adapters.lease.redis import RedisLeaseQueue
from dure.core.lease import TaskStatus
from dure.core.model import JobId

SERVER = shutil.which("redis-server")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RedisServer:
    """One server process; `crash` is kill -9, `start` brings it back with its files."""

    def __init__(self, folder: Path, *more: str, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.port = free_port()
        self.host = host
        self.more = more
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    def client(self, **options: object) -> redis.Redis:
        return redis.Redis(host=self.host, port=self.port, **options)

    def start(self) -> None:
        assert SERVER, "redis-server is not installed: run tools/test-packages.sh"
        options = ["--port", str(self.port), "--bind", self.host, "--dir", str(self.folder)]
        options += ["--appendonly", "yes", "--save", "", "--loglevel", "warning", *self.more]
        self.process = subprocess.Popen([SERVER, *options], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                if self.client(socket_timeout=1).ping():
                    return
            except redis.exceptions.AuthenticationError:
                return
            except redis.exceptions.RedisError:
                time.sleep(0.02)
        raise AssertionError("redis-server does not answer")

    def crash(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


class MemoryRig:
    """The fake on a clock that is moved by hand."""

    name = "memory"

    def __init__(self, server: RedisServer | None = None, *, ttl_s: float = 90.0) -> None:
        del server
        self.clock = ManualClock()
        self.queue = MemoryLeaseQueue(self.clock, ttl_s=ttl_s)

    def now_ms(self) -> int:
        return self.clock.now_ms()

    def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def lose_beat(self, job: int) -> None:
        """The beat of a task runs out at once."""
        self.queue._board.lines.beats.pop(JobId(job), None)

    def lose_claim(self, job: int) -> None:
        """Redis comes back without its last writes: the claim has never been."""
        entry = self.queue._board.tasks[JobId(job)]
        self.queue._board.lines.leave(JobId(job))
        entry.status, entry.lease_id, entry.acked = TaskStatus.PENDING, "", False
        entry.epoch = entry.issued - 1
        self.queue._board.lines.pending.append(JobId(job))

    def close(self) -> None:
        self.queue.close()


class RedisRig:
    """The real one; its time is real, so tests give it short ones."""

    name = "redis"

    def __init__(self, server: RedisServer, *, ttl_s: float = 90.0, prefix: str = "dure:") -> None:
        self.raw = server.client()
        self.raw.flushall()
        self.prefix = prefix
        self.queue = RedisLeaseQueue(server.url, prefix=prefix, ttl_s=ttl_s)

    def now_ms(self) -> int:
        seconds, micros = self.raw.time()
        return seconds * 1000 + micros // 1000

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def lose_beat(self, job: int) -> None:
        self.raw.delete(f"{self.prefix}task:heartbeat:{job}")

    def lose_claim(self, job: int) -> None:
        key = f"{self.prefix}task:{job}"
        issued = int(self.raw.hget(key, "issued_epoch"))
        self.raw.delete(f"{self.prefix}task:heartbeat:{job}")
        self.raw.zrem(f"{self.prefix}task:queue:dispatched", job)
        self.raw.hset(key, mapping={"status": "PENDING", "lease_id": "", "lease_epoch": issued - 1})
        self.raw.hdel(key, "acked_at")
        self.raw.lpush(f"{self.prefix}task:queue:pending", job)

    def close(self) -> None:
        self.queue.close()
        self.raw.close()


RIGS = {"memory": MemoryRig, "redis": RedisRig}
