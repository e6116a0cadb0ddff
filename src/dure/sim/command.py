"""`dure simulate`: the production planner on a recorded or made-up load, policies compared."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from dure.sim.generate import generate
from dure.sim.metrics import measure
from dure.sim.profiles import profile
from dure.sim.replay import Options, Replay
from dure.sim.trace import Cluster, Trace, read_cluster, read_trace

COLUMNS = {
    "mean_wait_h": "mean h",
    "p95_wait_h": "p95 h",
    "max_wait_h": "max h",
    "wait_8gpu_h": "8-GPU h",
    "starvation_h": "starved h",
    "jain": "Jain",
    "jain_6h": "Jain 6h",
    "worst_ratio": "worst x",
    "queue_empty_d": "empty d",
    "utilisation": "util",
    "reservations_broken_share": "broken",
    "seconds": "s",
}


@click.command()
@click.option("--trace", "trace_file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--cluster", "cluster_file", type=click.Path(path_type=Path), required=True)
@click.option("--policy", "policies", multiple=True, default=("classic",), help="profile name")
@click.option("--slots", type=click.IntRange(0), default=0, help="personal limit; 0: none")
@click.option("--jitter", type=click.IntRange(0, 1000), default=0, help="runs with moved submits")
@click.option("--seed", type=int, default=0, help="of jitter and of a made-up trace")
@click.option("--generate", "made", type=click.IntRange(1), help="this many made-up jobs")
@click.option("--json", "as_json", is_flag=True, help="machine-readable")
def simulate(
    trace_file: Path | None,
    cluster_file: Path,
    policies: tuple[str, ...],
    slots: int,
    jitter: int,
    seed: int,
    made: int | None,
    as_json: bool,
) -> None:
    """Replay a load under one or more policies and compare what people would have waited."""
    if (trace_file is None) == (made is None):
        raise click.UsageError("give either --trace FILE or --generate N")
    cluster = read_cluster(cluster_file)
    trace = read_trace(trace_file) if trace_file else generate(made or 1, 6, 7.0, seed)
    rows = {name: _average(trace, cluster, name, slots, jitter, seed) for name in policies}
    if as_json:
        click.echo(json.dumps({"rejected": trace.rejected, "policies": rows}))
        return
    click.echo(
        f"{len(trace.jobs)} jobs on {cluster.gpus} GPUs; {trace.rejected} rejected (over 8 GPUs)",
        err=True,
    )
    _table(rows)


def _average(
    trace: Trace, cluster: Cluster, name: str, slots: int, jitter: int, seed: int
) -> dict[str, float]:
    """Mean of all runs: list scheduling is chaotic, one run says little."""
    runs = []
    for number in range(max(1, jitter)):
        moved = _moved(trace, f"{seed}.{number}") if jitter else trace
        began = time.perf_counter()
        replay = Replay(moved, cluster, profile(name), Options(slots=slots))
        result = replay.run(_progress(name) if sys.stderr.isatty() else None)
        flat = measure(result).flat()
        runs.append({**flat, "seconds": round(time.perf_counter() - began, 2)})
    return {key: round(statistics.fmean(r[key] for r in runs), 4) for key in runs[0]}


def _moved(trace: Trace, seed: str) -> Trace:
    """Submit times moved by 0 to 30 s."""
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    jobs = [
        msgspec.structs.replace(j, submit_s=j.submit_s + rng.uniform(0, 30)) for j in trace.jobs
    ]
    return Trace(tuple(sorted(jobs, key=lambda j: (j.submit_s, j.id))), trace.rejected)


def _progress(name: str) -> Callable[[int, int], None]:
    began = time.monotonic()

    def tell(done: int, of: int) -> None:
        speed = done / max(1e-9, time.monotonic() - began)
        click.echo(f"\r{name}: {done}/{of} jobs, {speed:,.0f}/s ", nl=False, err=True)

    return tell


def _table(rows: dict[str, dict[str, float]]) -> None:
    width = max(len("policy"), *(len(n) for n in rows))
    click.echo(" ".join(["policy".ljust(width), *(c.rjust(9) for c in COLUMNS.values())]))
    for name, row in rows.items():
        cells = [f"{row[key]:9.3g}" if row[key] < 1000 else f"{row[key]:9.0f}" for key in COLUMNS]
        click.echo(" ".join([name.ljust(width), *cells]))
