"""Dispatches a second, end to end: plan, write ahead, launch, start, end, charge.

SQLite on disk (WAL, synchronous=FULL), simulated machines whose jobs end at once, slots
lifted. A dispatch is counted when its job has been charged. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from dure.adapters.clock import ManualClock
from dure.adapters.compute.simulated import SimRun, SimulatedBackend
from dure.adapters.store.sql import SqlStore
from dure.core.model import Gpu, JobRequest, JobState, Lab, Node, Tier, User
from dure.core.policy import Policy
from dure.engine import commands
from dure.engine.controller import Controller
from dure.engine.engine import Engine
from dure.ports import JobFilter


def installation(folder: str, jobs: int, nodes: int) -> tuple[Engine, Controller, ManualClock]:
    """An engine on SQLite with `nodes` machines of 8 GPUs, and `jobs` submitted jobs."""
    clock = ManualClock()
    store = SqlStore(f"sqlite:///{Path(folder) / 'bench.db'}")
    machines = [
        Node(
            name=f"n{i:03}",
            backend="simulated",
            gpus=tuple(Gpu(index=k, tier="RTX4090") for k in range(8)),
            memory_mib=64_000,
            cores=32,
        )
        for i in range(nodes)
    ]
    users = [User(name=f"u{i}", lab=f"L{i % 4}") for i in range(8)]
    with store.write() as tx:
        tx.put_tier(Tier(name="RTX4090", vram_gb=24, mtflops=82_600, max_gpus=8))
        for machine in machines:
            tx.put_node(machine)
        for i in range(4):
            tx.put_lab(Lab(name=f"L{i}"))
        for user in users:
            tx.put_user(user)
    backend = SimulatedBackend(clock, machines, lambda _: SimRun(run_ms=1000))
    policy = Policy(slots_per_user=1_000_000, waiting_per_user=1_000_000)
    engine = Engine(store, clock, policy, {"simulated": backend})
    controller = Controller(engine, sweep_s=5)
    for user in users:
        request = JobRequest(name="bench", lab=user.lab, command=("train",))
        commands.submit(engine, user, [request] * (jobs // len(users)))
    return engine, controller, clock


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--nodes", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        engine, controller, clock = installation(folder, args.jobs, args.nodes)
        submit_s = time.perf_counter() - began
        began = time.perf_counter()
        rounds = 0
        while len(engine.world.index):
            controller.turn()
            clock.advance(1)
            rounds += 1
        controller.turn()
        took_s = time.perf_counter() - began
        with engine.store.read() as tx:
            charged = len({e.job for e in tx.ledger()})
            left = tx.list_jobs(JobFilter(states=(JobState.RUNNING,)))
        engine.store.close()
    assert charged == args.jobs, (charged, left)
    metrics = {
        "dispatches_per_s": round(args.jobs / took_s),
        "submits_per_s": round(args.jobs / submit_s),
        "jobs": args.jobs,
        "gpus": args.nodes * 8,
        "cycles": rounds,
    }
    print(json.dumps({"name": "dispatch", "metrics": metrics}))


if __name__ == "__main__":
    main()
