"""Start time of each runtime of this machine: order given → first line of the job, p50.

Real backend, supervisor and jail; the job is `true`-like and prints a line with the time.
The last line is one JSON object: milliseconds from spawning the supervisor to the command's
first instruction, of each runtime, and what a jail adds to the plain process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dure.adapters.clock import SystemClock
from dure.adapters.compute.local import controllers
from dure.adapters.compute.local.backend import LocalBackend
from dure.adapters.compute.local.confinement import Confinement
from dure.adapters.compute.local.gpus import Declared, Machine
from dure.adapters.runtime import host
from dure.adapters.runtime.choose import apptainer, bubblewrap
from dure.adapters.runtime.jail import Yard
from dure.adapters.runtime.process import ProcessRuntime
from dure.core.model import PlacementId
from dure.ports import Freed, LaunchOrder, LeaseKey, Runtime, Started

UID = 64_120
"""A user of no account, whom jobs become where this runs as root."""
COMMAND = ("/bin/sh", "-c", "date +%s%N")


def order(job: int, uid: int) -> LaunchOrder:
    """One job that tells when it began."""
    return LaunchOrder(
        key=LeaseKey(job=job, epoch=1),
        placement=PlacementId(node="bench", tier="SIM"),
        gpus=(0,),
        user="u",
        lab="L",
        name="bench",
        command=COMMAND,
        env={},
        workdir="",
        start_no=1,
        simulated=True,
        memory_mib=512,
        unix_uid=uid,
    )


def run_one(backend: LocalBackend, job: int, uid: int) -> tuple[float, float]:
    """(milliseconds to the command's own clock, milliseconds to `Started`)."""
    began = time.time_ns()
    (answer,) = backend.launch([order(job, uid)])
    assert not answer.reason, answer.reason
    key = LeaseKey(job=job, epoch=1)
    started = 0.0
    end = time.monotonic() + 20
    while time.monotonic() < end:
        seen, _ = backend.observe(0)
        mine = [o for o in seen if getattr(o, "key", None) == key]
        if not started and any(isinstance(o, Started) for o in mine):
            started = (time.time_ns() - began) / 1e6
        if any(isinstance(o, Freed) for o in mine):
            break
        time.sleep(0.001)
    path = backend.log_path(key)
    assert path is not None
    words = Path(path).read_text()
    return (int(words.split()[-1]) - began) / 1e6, started


def runtimes(yard: Yard) -> Iterator[tuple[str, Runtime | str, int]]:
    """Name, runtime (or why not), and whom jobs become."""
    root = os.getuid() == 0
    yield "process", ProcessRuntime(), 0
    yield "bubblewrap", bubblewrap(yard), 0
    if root:
        yield "bubblewrap_root", bubblewrap(yard), UID
    yield "apptainer", apptainer(yard), UID if root else 0


def measure(yard: Yard, runtime: Runtime, uid: int, jobs: int) -> dict[str, float]:
    """Medians over some jobs, one after another."""
    machine = Machine("bench", [Declared(tier="SIM", count=1, simulated=True)])
    confinement = Confinement(
        uid=os.getuid(),
        state_dir=yard.state_dir,
        controllers=controllers.find().layout,
        processes=200,
    )
    folder = Path(yard.state_dir, f"runs-{runtime.name}-{uid}")
    backend = LocalBackend(folder, machine, runtime, SystemClock(), confinement=confinement)
    try:
        took = [run_one(backend, job, uid) for job in range(1, jobs + 1)]
    finally:
        backend.close()
    return {
        "to_command_ms_p50": round(statistics.median(t[0] for t in took), 1),
        "to_started_ms_p50": round(statistics.median(t[1] for t in took), 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=20)
    args = parser.parse_args()
    say: Callable[..., None] = print
    state = tempfile.mkdtemp(prefix="dure-bench-", dir="/var/tmp")
    metrics: dict[str, object] = {"jobs": args.jobs}
    try:
        yard = Yard(host=host.look(), state_dir=state)
        for name, runtime, uid in runtimes(yard):
            if isinstance(runtime, str):
                say(f"{name}: left out: {runtime}")
                continue
            found = measure(yard, runtime, uid, args.jobs)
            metrics |= {f"{name}_{key}": value for key, value in found.items()}
            say(f"{name}: {found}")
    finally:
        shutil.rmtree(state)
    bare = float(str(metrics["process_to_command_ms_p50"]))
    for name in ("bubblewrap", "bubblewrap_root", "apptainer"):
        if f"{name}_to_command_ms_p50" in metrics:
            total = float(str(metrics[f"{name}_to_command_ms_p50"]))
            metrics[f"{name}_adds_ms_p50"] = round(total - bare, 1)
    say(json.dumps({"name": "runtime", "metrics": metrics}))


if __name__ == "__main__":
    main()
