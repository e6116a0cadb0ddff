"""The comparison as CSV: one line a job, and one line a policy."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from dure.sim.comparison import Comparison
from dure.sim.refusals import Refusal, SimulationRefused

JOB_FIELDS = ("policy", "name", "lab", "user", "gpus", "submit_s", "start_s", "end_s", "tier")


def write_csv(folder: Path, comparison: Comparison) -> list[Path]:
    """Write jobs.csv and summary.csv into `folder`; refuse UNWRITABLE_FILE."""
    jobs, summary = folder / "jobs.csv", folder / "summary.csv"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(jobs, JOB_FIELDS, _jobs(comparison))
        flat = [(row.case.name, row.flat()) for row in comparison.rows]
        keys = list(flat[0][1])
        _write(summary, ["policy", *keys], ([n, *(v[k] for k in keys)] for n, v in flat))
    except OSError as error:
        raise unwritable(folder, error) from error
    return [jobs, summary]


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8; refuse UNWRITABLE_FILE."""
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> SimulationRefused:
    """The refusal of a place that cannot be written to."""
    problem = error.strerror or str(error)
    return SimulationRefused(Refusal.UNWRITABLE_FILE, path=str(path), problem=problem)


def _jobs(comparison: Comparison) -> Iterable[Sequence[object]]:
    for row in comparison.rows:
        for r in sorted(row.first.ran, key=lambda r: r.job.id):
            job = r.job
            times = (f"{t:.3f}" for t in (job.submit_s, r.start_s, r.end_s))
            yield (row.case.name, job.name, job.lab, job.user, job.num_gpus, *times, r.tier)


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
