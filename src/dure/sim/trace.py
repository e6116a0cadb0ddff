"""Traces of real clusters and descriptions of machines, as files.

A trace is CSV (`.gz` too) with `job_id, lab, user, submit_s, duration_s, num_gpus, gpu_model`;
a cluster is JSON with `tiers` and `node_groups`. Bad lines stop with their number.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from dure.core.model import Gpu, Lab, Node, NodeId, Shape, Tier, TierId
from dure.core.placement import Pool, fits
from dure.sim.refusals import Refusal, SimulationRefused

DAY_S = 86_400.0
LONGEST_S = 20 * 365 * DAY_S
MOST_GPUS = 1_000_000
MAX_GPUS = 8
"""P-3: larger jobs cannot run inside one placement and are reported as rejected."""


COLUMNS = ("job_id", "lab", "user", "submit_s", "duration_s", "num_gpus", "gpu_model")


class TraceJob(msgspec.Struct, frozen=True, gc=False):
    """One job of a trace; `run_s` is how long it runs once it has started."""

    id: int
    name: str
    lab: str
    user: str
    submit_s: float
    run_s: float
    num_gpus: int
    tiers: tuple[str, ...] = ()
    node: str = ""
    min_vram_gb: float = 0.0
    measured: bool = True
    """False: it ran already when the trace began, so that it never waited here."""


class Trace(msgspec.Struct, frozen=True):
    """Jobs in order of submit, and how many were left out.

    A history also knows its `labs` (weight and use at time zero) and each user's `slots`.
    """

    jobs: tuple[TraceJob, ...]
    rejected: int
    """Jobs of more GPUs than one job may have."""
    unfit: int = 0
    """Jobs that no node of the cluster could ever run."""
    labs: tuple[Lab, ...] = ()
    slots: Mapping[str, int] = {}


class Cluster(msgspec.Struct, frozen=True):
    """Machines and GPU models of one pool."""

    tiers: tuple[Tier, ...]
    nodes: tuple[Node, ...]
    weights: dict[str, float]

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return sum(len(n.gpus) for n in self.nodes)


def read_trace(path: Path) -> Trace:
    """Read a trace; refuse BAD_TRACE naming the first line that is wrong."""
    jobs: list[TraceJob] = []
    rejected = 0
    line = 1
    try:
        for row in csv.DictReader(io.StringIO(_text(path), newline="")):
            line += 1
            job = _job(line, row)
            if job.num_gpus > MAX_GPUS:
                rejected += 1
            else:
                jobs.append(job)
    except (TypeError, ValueError, csv.Error) as error:
        raise _bad_trace(path, line, str(error)) from error
    except KeyError as error:
        raise _bad_trace(path, line, f"no column {error}") from error
    if not jobs:
        raise _bad_trace(path, line, f"no job of at most {MAX_GPUS} GPUs")
    jobs.sort(key=lambda j: (j.submit_s, j.id))
    began_s = jobs[0].submit_s
    if jobs[-1].submit_s - began_s > LONGEST_S:
        raise _bad_trace(path, line, "submits more than 20 years apart")
    if began_s > DAY_S:
        # Times of day, not of the trace: all figures count from the first submit.
        jobs = [msgspec.structs.replace(j, submit_s=j.submit_s - began_s) for j in jobs]
    return Trace(tuple(jobs), rejected)


def _bad_trace(path: Path, line: int, problem: str) -> SimulationRefused:
    columns = ", ".join(COLUMNS)
    return SimulationRefused(
        Refusal.BAD_TRACE, path=str(path), line=line, problem=problem, columns=columns
    )


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except OSError as error:
        problem = error.strerror or str(error)
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        problem = str(error)
    raise SimulationRefused(Refusal.UNREADABLE_FILE, path=str(path), problem=problem)


def _job(line: int, row: dict[str, str | None]) -> TraceJob:
    run_s, gpus = float(row["duration_s"] or ""), int(row["num_gpus"] or "")
    submit_s = float(row["submit_s"] or "")
    if not (0 <= run_s < 1e10 and 0 <= submit_s < 1e11 and gpus >= 1):
        raise ValueError("a time or GPU count out of range")
    lab = row["lab"] or "unknown"
    model = row.get("gpu_model") or ""
    return TraceJob(
        id=line - 1,
        name=row["job_id"] or "",
        lab=lab,
        user=row.get("user") or lab,
        submit_s=submit_s,
        run_s=run_s,
        num_gpus=gpus,
        tiers=tuple(m for m in model.split("|") if m),
    )


def shape_of(job: TraceJob) -> Shape:
    """What decides where a job fits."""
    return Shape(
        num_gpus=job.num_gpus,
        tiers=tuple(sorted(TierId(t) for t in job.tiers)),
        node=NodeId(job.node) if job.node else None,
        floor_gb=job.min_vram_gb,
    )


def suited(trace: Trace, cluster: Cluster) -> Trace:
    """The trace without the jobs that fit no node; refuse NOTHING_FITS when none is left."""
    pool = Pool()
    for tier in cluster.tiers:
        pool.put_tier(tier)
    for node in cluster.nodes:
        pool.put_node(node)
    views = pool.views()
    known: dict[Shape, bool] = {}
    kept = []
    for job in trace.jobs:
        shape = shape_of(job)
        if shape not in known:
            known[shape] = any(fits(shape, v) for v in views)
        if known[shape]:
            kept.append(job)
    if not kept:
        most = max((min(v.capacity, v.tier.max_gpus) for v in views), default=0)
        raise SimulationRefused(Refusal.NOTHING_FITS, jobs=len(trace.jobs), most=most)
    unfit = len(trace.jobs) - len(kept)
    return msgspec.structs.replace(trace, jobs=tuple(kept), unfit=unfit)


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file; refuse BAD_CLUSTER when it is not one."""
    text = _text(path)
    try:
        raw = json.loads(text)
        tiers = tuple(_tier(t) for t in raw["tiers"])
        nodes = tuple(_nodes(raw["node_groups"]))
        weights = {str(k): float(v) for k, v in (raw.get("lab_weights") or {}).items()}
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise _bad_cluster(path, str(error)) from error
    except KeyError as error:
        raise _bad_cluster(path, f"no {error}") from error
    unknown = {g.tier for n in nodes for g in n.gpus} - {t.name for t in tiers}
    if unknown:
        raise _bad_cluster(path, f"no tier is named {', '.join(sorted(unknown))}")
    return Cluster(tiers, nodes, weights)


def _bad_cluster(path: Path, problem: str) -> SimulationRefused:
    return SimulationRefused(Refusal.BAD_CLUSTER, path=str(path), problem=problem)


def _tier(raw: dict[str, object]) -> Tier:
    return Tier(
        name=TierId(str(raw["name"])),
        vram_gb=float(str(raw["vram_gb"])),
        mtflops=round(float(str(raw["tflops"])) * 1000),
        sort_order=int(str(raw["sort_order"])),
        max_gpus=int(str(raw["max_gpus"])),
    )


def _nodes(groups: Iterable[dict[str, object]]) -> Iterator[Node]:
    for number, group in enumerate(groups):
        tier, gpus = TierId(str(group["tier"])), int(str(group["gpus"]))
        count = int(str(group["count"]))
        if not 0 <= gpus * count <= MOST_GPUS:
            raise ValueError(f"{gpus} x {count} GPUs: at most {MOST_GPUS} can be simulated")
        for i in range(count):
            yield node_of(f"{_letters(number)}{i:04}", tier, gpus)


def _letters(number: int) -> str:
    """Name of a group of nodes; names sort as the groups stand in the file."""
    return "z" * (number // 25) + "abcdefghijklmnopqrstuvwxy"[number % 25]


def node_of(name: str, tier: TierId, gpus: int) -> Node:
    """A made-up machine with all its GPUs of one tier."""
    return Node(
        name=NodeId(name),
        backend="simulated",
        gpus=tuple(Gpu(index=k, tier=tier) for k in range(gpus)),
        cores=4 * gpus,
        memory_mib=65_536 * gpus,
    )
