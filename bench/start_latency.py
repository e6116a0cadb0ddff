"""GPU freed → next process started, and submit → started on an idle GPU: p50 and p99.

Real engine on SQLite, real supervisors and processes on one declared slot of this machine;
times are the account's own (seen free, process start). Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from dure.adapters.clock import SystemClock
from dure.adapters.compute.local.backend import LocalBackend
from dure.adapters.compute.local.gpus import Declared, Machine
from dure.adapters.runtime.process import ProcessRuntime
from dure.adapters.store.sql import SqlStore
from dure.core.model import JobRequest, JobState, Lab, Tier, User
from dure.core.policy import Policy
from dure.engine import admin, commands
from dure.engine.controller import Controller
from dure.engine.engine import Engine

USER = User(name="u", lab="L")
REQUEST = JobRequest(name="bench", lab="L", command=("/bin/true",))


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of all lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def wait_idle(engine: Engine) -> None:
    """Until every attempt has been seen free."""
    while True:
        with engine.store.read() as tx:
            if not tx.open_attempts() and not list(tx.live_jobs()):
                return
        time.sleep(0.01)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clock = SystemClock()
        store = SqlStore(f"sqlite:///{Path(folder) / 'bench.db'}")
        machine = Machine("bench", [Declared(tier="SIM", count=1, simulated=True)])
        backend = LocalBackend(Path(folder) / "runs", machine, ProcessRuntime(), clock)
        with store.write() as tx:
            tx.put_tier(Tier(name="SIM", vram_gb=4, mtflops=1000))
            tx.put_lab(Lab(name="L"))
            tx.put_user(USER)
        policy = Policy(slots_per_user=1_000_000, waiting_per_user=1_000_000)
        engine = Engine(store, clock, policy, {"local": backend})
        controller = Controller(engine, sweep_s=5)
        for node in backend.inventory().nodes:
            admin.put_node(engine, "bench", node)
        controller.start()

        fresh = []
        for _ in range(args.jobs):
            job = commands.submit(engine, USER, [REQUEST]).jobs[0]
            wait_idle(engine)
            fresh.append(job.id)
        queued = [j.id for j in commands.submit(engine, USER, [REQUEST] * args.jobs).jobs]
        wait_idle(engine)
        with store.read() as tx:
            jobs = tx.jobs([*fresh, *queued])
            attempts = {i: tx.attempts(i)[0] for i in jobs}
        controller.stop()
        backend.close()
        store.close()
    assert all(j.state is JobState.COMPLETED for j in jobs.values())
    submit = [attempts[i].started_ms - jobs[i].submitted_ms for i in fresh]
    line = sorted((attempts[i] for i in queued), key=lambda a: a.dispatched_ms)
    freed = [b.started_ms - a.freed_ms for a, b in pairwise(line)]
    metrics = {
        "freed_to_started_ms_p50": percentile(freed, 0.5),
        "freed_to_started_ms_p99": percentile(freed, 0.99),
        "submit_to_started_ms_p50": percentile(submit, 0.5),
        "submit_to_started_ms_p99": percentile(submit, 0.99),
        "jobs": args.jobs,
    }
    print(json.dumps({"name": "start_latency", "metrics": metrics}))


if __name__ == "__main__":
    main()
