"""Traces of real clusters and descriptions of machines, as files.

A trace is CSV (`.gz` too) with `job_id, lab, user, submit_s, duration_s, num_gpus, gpu_model`;
a cluster is JSON with `tiers` and `node_groups`. Bad lines stop with their number.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dure.core.errors import DureError, ErrorCode
from dure.core.model import Gpu, Node, NodeId, Tier, TierId

MAX_GPUS = 8
"""P-3: larger jobs cannot run inside one placement and are reported as rejected."""


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


class Trace(msgspec.Struct, frozen=True):
    """Jobs in order of submit, and how many were rejected for their size."""

    jobs: tuple[TraceJob, ...]
    rejected: int


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
    """Read a trace; raise BAD_SETTING naming the first line that is wrong."""
    jobs: list[TraceJob] = []
    rejected = 0
    for number, row in enumerate(_rows(path), 2):
        try:
            job = _job(number, row)
        except (KeyError, ValueError) as error:
            what = f"line {number}: {error}"
            raise DureError(ErrorCode.BAD_SETTING, key=str(path), value=what) from error
        if job.num_gpus > MAX_GPUS:
            rejected += 1
        else:
            jobs.append(job)
    jobs.sort(key=lambda j: (j.submit_s, j.id))
    return Trace(tuple(jobs), rejected)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except OSError as error:
        raise DureError(ErrorCode.BAD_SETTING, key=str(path), value=str(error)) from error
    yield from csv.DictReader(io.StringIO(raw.decode("utf-8")))


def _job(number: int, row: dict[str, str]) -> TraceJob:
    run_s, gpus = float(row["duration_s"]), int(row["num_gpus"])
    submit_s = float(row["submit_s"])
    if not (0 <= run_s < 1e10 and 0 <= submit_s < 1e11 and gpus >= 1):
        raise ValueError("a time or GPU count out of range")
    model = row.get("gpu_model") or ""
    return TraceJob(
        id=number - 1,
        name=row["job_id"],
        lab=row["lab"] or "unknown",
        user=row.get("user") or row["lab"],
        submit_s=submit_s,
        run_s=run_s,
        num_gpus=gpus,
        tiers=tuple(m for m in model.split("|") if m),
    )


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file; raise BAD_SETTING when it is not one."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        tiers = tuple(_tier(t) for t in raw["tiers"])
        nodes = tuple(_nodes(raw["node_groups"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DureError(ErrorCode.BAD_SETTING, key=str(path), value=repr(error)) from error
    weights = {k: float(v) for k, v in (raw.get("lab_weights") or {}).items()}
    return Cluster(tiers, nodes, weights)


def _tier(raw: dict[str, object]) -> Tier:
    return Tier(
        name=TierId(str(raw["name"])),
        vram_gb=float(str(raw["vram_gb"])),
        mtflops=round(float(str(raw["tflops"])) * 1000),
        sort_order=int(str(raw["sort_order"])),
        max_gpus=int(str(raw["max_gpus"])),
    )


def _nodes(groups: Iterable[dict[str, object]]) -> Iterator[Node]:
    for letter, group in zip("abcdefghijklmnopqrstuvwxyz", groups, strict=False):
        gpus = int(str(group["gpus"]))
        for i in range(int(str(group["count"]))):
            yield Node(
                name=NodeId(f"{letter}{i:04}"),
                backend="simulated",
                gpus=tuple(Gpu(index=k, tier=TierId(str(group["tier"]))) for k in range(gpus)),
                cores=4 * gpus,
                memory_mib=65_536 * gpus,
            )
