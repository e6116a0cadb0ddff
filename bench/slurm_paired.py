"""Dure beside a real Slurm in one run: same pool, same numbers of waiting jobs.

The pool is 40 nodes of 8 GPUs in two tiers. Slurm gets arrays, for single submissions of
50,000 jobs would take it many minutes, and each task is then made a job record of its own
(by an update of that task alone): an array left whole is one record to its scheduler, which
would make its cycle look cheap. That happens while the partitions are down.

- `cycle_ratio_*`: mean scheduling cycle with no idle GPU, Dure's divided by Slurm's. Slurm's
  is sdiag's mean of the main scheduler. Its parameters are the defaults, which give the
  shortest cycles, except that the main loop runs every 2 s instead of 60 so that the mean has
  enough samples. A job that leaves the choice among two partitions is tested in each. Its
  priority is first come, first served, without preemption: it knows no labs in this run.
- `decision_rate_ratio`: jobs started a second of scheduling when the whole pool falls idle
  with 10,000 waiting. Slurm's seconds are those of its main scheduler by sdiag; Dure's are a
  whole cycle with its durable transaction (SQLite, synchronous=FULL) and the launch orders.
  `plan_rate_ratio` leaves the transaction out.

slurmctld stands still while Dure is measured, and Dure does nothing while Slurm is. Needs
root and Debian's Slurm. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import dispatch
from cycle import cycle, fill, make_index, make_pool

from dure.core.model import JobRequest, Lab
from dure.engine import commands

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tools.slurm_testbed import NodeSpec, Testbed, unavailable  # noqa: E402 - a script's neighbour

NODES = 40
GPUS = 8
TIERS = ("rtx4090", "rtx3080ti")
ARRAY = 100
SHAPES = tuple((n, p) for n in (1, 1, 1, 2, 4) for p in ("rtx4090", "rtx4090,rtx3080ti"))
TURNS = 1000


# -- Slurm ---------------------------------------------------------------------------


class Queue:
    """Slurm's side: fills, waits, reads sdiag."""

    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        self.arrays = 0

    def add(self, count: int) -> float:
        """Submit `count` more jobs; seconds it took. Partitions should be down."""
        began = time.perf_counter()
        while count > 0:
            tasks = min(count, ARRAY)
            gpus, partition = SHAPES[self.arrays % len(SHAPES)]
            self.arrays += 1
            gres, script = f"--gres=gpu:{gpus}", "exec sleep 100000"
            array = self.bed.run(
                *("sbatch", "--parsable", "-p", partition, gres, f"--array=1-{tasks}"),
                *("-D", "/", "-o", "/dev/null", "--wrap", script),
            ).strip()
            split = [f"update JobId={array}_{i} Comment=single\n" for i in range(1, tasks)]
            subprocess.run(
                ["scontrol"],
                input="".join(split),
                env=self.bed.env,
                text=True,
                stdout=subprocess.DEVNULL,
                check=True,
            )
            count -= tasks
        return time.perf_counter() - began

    def partitions(self, state: str) -> None:
        """UP: they schedule; DOWN: they only queue."""
        for name in TIERS:
            self.bed.run("scontrol", "update", f"PartitionName={name}", f"State={state}")

    def pending(self) -> int:
        """Jobs that wait; sdiag's own count is minutes old."""
        return len(self.bed.run("squeue", "-h", "-t", "PD", "-o", "%i", timeout_s=60).split())

    def handed_out(self) -> dict[str, float]:
        """Let the idle pool be handed out; jobs started and seconds of main scheduling."""
        self.bed.run("sdiag", "--reset")
        self.partitions("UP")
        most, still = 0, 0
        while still < 8:
            time.sleep(0.25)
            started = diag(self.bed, "Jobs started")
            still = 0 if started > most or not started else still + 1
            most = max(most, started)
        text = self.bed.run("sdiag")
        main = text[text.index("Main schedule") : text.index("Backfilling stats")]
        backfilled = number(text, "Total backfilled jobs (since last stats cycle start)")
        spent_s = number(main, "Mean cycle") * number(main, "Total cycles") / 1e6
        jobs = most - backfilled
        return {"jobs": jobs, "seconds": spent_s, "per_s": jobs / spent_s}

    def cycles(self, seconds: float) -> dict[str, float]:
        """Main cycles of the next `seconds` with nothing to start."""
        self.bed.run("sdiag", "--reset")
        time.sleep(seconds)
        text = self.bed.run("sdiag")
        main = text[text.index("Main schedule") : text.index("Backfilling stats")]
        return {
            "mean_ms": number(main, "Mean cycle") / 1000,
            "max_ms": number(main, "Max cycle") / 1000,
            "cycles": number(main, "Total cycles"),
            "jobs_tested_mean": number(main, "Mean depth cycle"),
            "waiting": self.pending(),
        }


def number(text: str, name: str) -> int:
    """One of sdiag's figures."""
    found = re.search(rf"{re.escape(name)}:\s*(\d+)", text)
    return int(found.group(1)) if found else 0


def diag(bed: Testbed, name: str) -> int:
    """One figure, read now."""
    return number(bed.run("sdiag"), name)


# -- Dure ----------------------------------------------------------------------------


def dure_cycles(waiting: int) -> dict[str, float]:
    """Wall time of the production planner's cycle, no GPU idle, labs' use changing."""
    pool = make_pool(NODES)
    fill(pool)
    index = make_index(waiting)
    times = []
    for turn in range(TURNS):
        # As a charge would between two cycles: the order of labs is made anew.
        index.put_lab(Lab(name=f"L{turn % 12:02}", usage_micro=1e9 * (turn + 1)))
        began = time.perf_counter()
        cycle(index, pool)
        times.append((time.perf_counter() - began) * 1000)
    return {"mean_ms": sum(times) / len(times), "max_ms": max(times), "cycles": len(times)}


def dure_hands_out(waiting: int) -> dict[str, float]:
    """One cycle over an idle pool, with its transaction and its launch orders."""
    with tempfile.TemporaryDirectory() as folder:
        engine, controller, _ = dispatch.installation(folder, 0, NODES)
        with engine.store.read() as tx:
            users = tx.users()
        counts = (1, 1, 1, 2, 4)
        for number_, user in enumerate(users):
            requests = [
                JobRequest(
                    name="b", lab=user.lab, command=("t",), num_gpus=counts[(i + number_) % 5]
                )
                for i in range(waiting // len(users))
            ]
            commands.submit(engine, user, requests)
        engine.catch_up()
        began = time.perf_counter()
        kept = controller._cycle()
        seconds = time.perf_counter() - began
        engine.store.close()
    index = make_index(waiting)
    plan_s, planned = min(timed_plan(index) for _ in range(5))
    return {
        "jobs": kept,
        "seconds": seconds,
        "per_s": kept / seconds,
        "planned_per_s": planned / plan_s,
    }


def timed_plan(index) -> tuple[float, int]:
    """Seconds and decisions of one cycle over an idle pool, without the store."""
    pool = make_pool(NODES)
    began = time.perf_counter()
    count = cycle(index, pool)
    return time.perf_counter() - began, count


# -- both ----------------------------------------------------------------------------


def paused(bed: Testbed, measure, *args: int) -> dict[str, float]:
    """Measure Dure while slurmctld stands still."""
    bed.pause_controller()
    try:
        return measure(*args)
    finally:
        bed.resume_controller()


def compare(bed: Testbed, sizes: list[int], seconds: float) -> dict[str, float]:
    """The whole run."""
    queue = Queue(bed)
    metrics: dict[str, float] = {}
    queue.partitions("DOWN")
    took_s = queue.add(sizes[0])
    print(f"Slurm: {sizes[0]} jobs submitted in {took_s:.0f} s", flush=True)
    slurm = queue.handed_out()
    dure = paused(bed, dure_hands_out, sizes[0])
    print(f"idle pool handed out: Slurm {slurm}, Dure {dure}", flush=True)
    metrics["decision_rate_ratio"] = round(dure["per_s"] / slurm["per_s"], 2)
    metrics["plan_rate_ratio"] = round(dure["planned_per_s"] / slurm["per_s"], 2)
    metrics["slurm_decisions_per_s"] = round(slurm["per_s"])
    metrics["dure_decisions_per_s"] = round(dure["per_s"])
    metrics["dure_planned_per_s"] = round(dure["planned_per_s"])
    for size in sizes:
        lacking = size - queue.pending()
        if lacking > 0:
            queue.partitions("DOWN")
            took_s = queue.add(lacking)
            queue.partitions("UP")
            print(f"Slurm: {lacking} more in {took_s:.0f} s", flush=True)
            time.sleep(5)
        slurm = queue.cycles(seconds)
        dure = paused(bed, dure_cycles, size)
        label = f"{size // 1000}k"
        print(f"{label} waiting, no idle GPU: Slurm {slurm}, Dure {dure}", flush=True)
        metrics[f"cycle_ratio_{label}"] = round(dure["mean_ms"] / slurm["mean_ms"], 5)
        metrics[f"dure_cycle_{label}_ms"] = round(dure["mean_ms"], 4)
        metrics[f"slurm_cycle_{label}_ms"] = round(slurm["mean_ms"], 3)
        metrics[f"slurm_cycle_{label}_jobs_tested"] = slurm["jobs_tested_mean"]
        metrics[f"slurm_waiting_{label}"] = slurm["waiting"]
    return metrics


def main() -> None:
    """Measure and print; without a Slurm say so and end well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 50_000])
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    why = unavailable()
    if why:
        print(json.dumps({"name": "slurm_paired", "skipped": why}))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    nodes = tuple(
        NodeSpec(f"n{i:03}", gres_type=TIERS[i % 2], gpus=GPUS, cores=32) for i in range(NODES)
    )
    folder = Path(tempfile.mkdtemp(prefix="dure-slurm-")).resolve()
    with Testbed(folder, nodes, scheduler="sched_interval=2", preempt=False) as bed:
        bed.wait(lambda: bed.run("scontrol", "ping", check=False), 10, "no controller")
        metrics = compare(bed, args.sizes, args.seconds)
    metrics["load_1min"] = round(os.getloadavg()[0], 1)
    print(json.dumps({"name": "slurm_paired", "metrics": metrics}))


if __name__ == "__main__":
    main()
