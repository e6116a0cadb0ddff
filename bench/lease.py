"""The lease queue on a private Redis: fenced cycles a second, and the wake-up of an agent.

A cycle is one claim and one complete, each fenced and lease-checked, in one thread. Dramatiq,
Celery and RQ run no-op tasks on the same Redis in turn with it, if a Python that has them is
named: `bench/lease.py --peers PYTHON`. They are no like for like: they also import, dispatch
and serialise, and none of them fences. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import redis

from dure.adapters.lease.redis import RedisLeaseQueue
from dure.core.lease import Commit, End, NodeMark, Report, Task
from dure.core.model import JobId, NodeHealth, NodeId

CYCLES = 4000
WAKES = 300
ROUNDS = 3
PEERS = ("dramatiq", "celery", "rq")
NODE = NodeId("bench")


class Server:
    """A Redis as it must be run: appendonly, synced every second."""

    def __init__(self, program: str, folder: str) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        argv = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", folder]
        argv += ["--appendonly", "yes", "--save", "", "--loglevel", "warning"]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        self.client = redis.Redis(port=self.port)
        for _ in range(500):
            try:
                self.client.ping()
            except redis.exceptions.ConnectionError:
                time.sleep(0.01)
            else:
                return
        raise SystemExit("redis-server does not answer")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


def task(job: int) -> Task:
    return Task(job=JobId(job), epoch=1, node=NODE, payload=b"{}")


def cycles(queue: RedisLeaseQueue) -> float:
    """Claims with completes, a second."""
    queue.mark([NodeMark(node=NODE, state=NodeHealth.STABLE, ready=True)])
    queue.enqueue([task(job) for job in range(1, CYCLES + 1)])
    begun = time.perf_counter()
    for number in range(CYCLES):
        (claim,) = queue.claim(NODE, [f"{number:032x}"])
        done = Report(ticket=claim.ticket, end=End.DONE, result=b"{}", freed_age_ms=0)
        assert queue.report([done]) == [Commit.OK]
    return CYCLES / (time.perf_counter() - begun)


def batched(queue: RedisLeaseQueue) -> float:
    """The same, four leases a call, as an agent with a full machine does."""
    queue.enqueue([task(job) for job in range(1, CYCLES + 1)])
    begun = time.perf_counter()
    for first in range(0, CYCLES, 4):
        claims = queue.claim(NODE, [f"{first + i:032x}" for i in range(4)])
        done = [Report(ticket=c.ticket, end=End.DONE, result=b"{}", freed_age_ms=0) for c in claims]
        assert queue.report(done) == [Commit.OK] * 4
    return CYCLES / (time.perf_counter() - begun)


def wakes(queue: RedisLeaseQueue) -> list[float]:
    """Milliseconds from the call that enqueues to the claim in an agent's hands."""
    took: list[float] = []
    claimed = threading.Semaphore(0)
    begun = [0.0]

    def agent() -> None:
        for number in range(WAKES):
            while not queue.doorbell(NODE, 5):
                pass
            (claim,) = queue.claim(NODE, [f"wake{number}"])
            took.append((time.perf_counter() - begun[0]) * 1000)
            queue.report([Report(ticket=claim.ticket, end=End.DONE, freed_age_ms=0)])
            claimed.release()

    while queue.doorbell(NODE, 0):
        pass
    thread = threading.Thread(target=agent, daemon=True)
    thread.start()
    for number in range(WAKES):
        time.sleep(0.002)
        begun[0] = time.perf_counter()
        queue.enqueue([task(1_000_000 + number)])
        claimed.acquire()
    thread.join(10)
    return sorted(took)


def peer(python: str, name: str, url: str) -> float | None:
    """Tasks a second of a peer's one worker; None, with one line, if it cannot run."""
    script = Path(__file__).parent / "peers" / f"{name}_peer.py"
    done = subprocess.run(
        [python, str(script), url], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        print(f"{name}: not measured ({(done.stderr.strip().splitlines() or ['?'])[-1]})")
        return None
    return float(done.stdout.strip().splitlines()[-1])


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("--peers", default="", help="a Python with dramatiq, celery and rq")
    python = asked.parse_args().peers
    program = shutil.which("redis-server")
    if program is None:
        print("redis-server is not installed: apt-get install redis-server")
        return 1
    names = PEERS if python else ()
    if not python:
        print("peers: not measured (no --peers PYTHON)")
    found: dict[str, list[float]] = {name: [] for name in ("dure", "dure x4", *names)}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(program, folder)
        try:
            for _ in range(ROUNDS):
                server.client.flushall()
                queue = RedisLeaseQueue(server.url)
                found["dure"].append(cycles(queue))
                server.client.flushall()
                found["dure x4"].append(batched(queue))
                queue.close()
                for name in names:
                    server.client.flushall()
                    rate = peer(python, name, server.url)
                    found[name] += [rate] if rate else []
            server.client.flushall()
            waits = wakes(RedisLeaseQueue(server.url))
        finally:
            server.process.kill()
            server.process.wait()
    for name, rates in found.items():
        if rates:
            spread = f"{min(rates):.0f}-{max(rates):.0f}"
            print(f"{name:<9} {statistics.median(rates):7.0f} a second  [{spread}]")
    result = {
        "cycles_per_s": round(statistics.median(found["dure"])),
        "cycles_per_s_batched": round(statistics.median(found["dure x4"])),
        "wake_ms_p50": round(waits[len(waits) // 2], 3),
        "wake_ms_p95": round(waits[round(len(waits) * 0.95) - 1], 3),
        "peers_per_s": {
            name: round(statistics.median(found[name])) for name in names if found[name]
        },
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
