"""Run every contender on its load, once or with moved submit times, and average."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from dure.sim.contenders import CONTENDERS, Contender, Line
from dure.sim.metrics import Waits, measure
from dure.sim.refusals import Refusal, SimulationRefused
from dure.sim.replay import Options, Replay, Result, Tell
from dure.sim.texts import Note
from dure.sim.trace import Cluster, Trace, suited
from dure.sim.whole import Whole


class Case(msgspec.Struct, frozen=True):
    """One column of the comparison: a contender on a load and a cluster."""

    name: str
    contender: Contender
    trace: Trace
    cluster: Cluster


class Runs(msgspec.Struct, frozen=True):
    """How cases run. `slots` None: as the trace has them, 0: no personal limit."""

    jitter: int = 0
    seed: int = 0
    slots: int | None = None
    engine: bool = False


class Row(msgspec.Struct, frozen=True):
    """What one case gave: means over all runs, and the first run whole."""

    case: Case
    values: dict[str, float]
    sd: dict[str, float] | None
    by_gpus: dict[int, Waits]
    first: Result
    violations: tuple[str, ...]

    def flat(self) -> dict[str, float]:
        """The keys of `--json`."""
        return self.values | {f"{key}_sd": x for key, x in (self.sd or {}).items()}


class Comparison(msgspec.Struct, frozen=True):
    """All rows, how they were run, and what a reader must know."""

    rows: tuple[Row, ...]
    runs: Runs
    notes: tuple[Note, ...] = ()

    @property
    def trace(self) -> Trace:
        """The load of the first case."""
        return self.rows[0].case.trace

    @property
    def cluster(self) -> Cluster:
        """The cluster of the first case."""
        return self.rows[0].case.cluster

    def facts(self) -> list[Note]:
        """All notes: what was left out, how it was run, what the load itself says."""
        found: list[Note] = [*self.notes]
        if self.trace.rejected:
            found.append(("rejected", {"count": self.trace.rejected}))
        found += self._unfit()
        found.append(self._slots())
        if self.runs.engine:
            found += self._checked()
        many = self.runs.jitter > 0
        found.append(("runs", {"runs": self.runs.jitter}) if many else ("one_run", {}))
        return found

    def _unfit(self) -> list[Note]:
        """What fits nowhere, once for each number of jobs: only changed nodes differ."""
        cases: dict[int, list[str]] = {}
        for row in self.rows:
            cases.setdefault(row.case.trace.unfit, []).append(row.case.name)
        return [("unfit", {"count": n, "cases": ", ".join(c)}) for n, c in cases.items() if n]

    def _slots(self) -> Note:
        if self.runs.slots is None and self.trace.slots:
            return "own_slots", {}
        return ("slots", {"slots": self.runs.slots}) if self.runs.slots else ("no_slots", {})

    def _checked(self) -> list[Note]:
        broken: list[Note] = [
            ("violation", {"case": row.case.name, "detail": detail})
            for row in self.rows
            for detail in row.violations
        ]
        return broken or [("engine", {"checked": sum(len(r.first.ran) for r in self.rows)})]


def cases(contenders: Iterable[Contender], trace: Trace, cluster: Cluster) -> list[Case]:
    """A case for each contender; refuse NOTHING_FITS when the cluster suits no job."""
    fitting = suited(trace, cluster)
    return [Case(c.name, c, fitting, cluster) for c in contenders]


def compare(
    wanted: Sequence[Case], runs: Runs, teller: Callable[[str], Tell | None]
) -> tuple[Row, ...]:
    """Run all cases; `teller(name)` says whom to tell of a case's progress."""
    if runs.engine:
        for case in wanted:
            if case.contender.line is not Line.PLANNER:
                known = ", ".join(n for n, c in CONTENDERS.items() if c.line is Line.PLANNER)
                raise SimulationRefused(Refusal.NOT_IN_ENGINE, name=case.name, known=known)
    return tuple(_row(case, runs, teller(case.name)) for case in wanted)


def _row(case: Case, runs: Runs, tell: Tell | None) -> Row:
    """Mean of all runs: list scheduling is chaotic, one run says little."""
    found: list[dict[str, float]] = []
    waits: list[dict[int, Waits]] = []
    violations: list[str] = []
    first: Result | None = None
    count = max(1, runs.jitter)
    for number in range(count):
        moved = _moved(case.trace, f"{runs.seed}.{number}") if runs.jitter else case.trace
        began = time.perf_counter()
        result = _run(case, moved, runs, _part(tell, number, count))
        measured = measure(result)
        found.append({**measured.flat(), "seconds": round(time.perf_counter() - began, 2)})
        waits.append(measured.by_gpus)
        violations += result.violations
        first = first or result
    assert first is not None
    values = {key: round(statistics.fmean(r[key] for r in found), 4) for key in found[0]}
    sd = {key: round(_sd([r[key] for r in found]), 4) for key in found[0]} if runs.jitter else None
    return Row(case, values, sd, _mean_waits(waits), first, tuple(violations))


def _run(case: Case, trace: Trace, runs: Runs, tell: Tell | None) -> Result:
    options = Options(
        slots=runs.slots or 0,
        slots_of=trace.slots if runs.slots is None else {},
        line=case.contender.line,
    )
    if runs.engine:
        return Whole(trace, case.cluster, case.contender.policy, options).run(tell)
    return Replay(trace, case.cluster, case.contender.policy, options).run(tell)


def _part(tell: Tell | None, number: int, count: int) -> Tell | None:
    """Progress of one run of several."""
    if tell is None:
        return None
    return lambda done, of: tell(number * of + done, count * of)


def _sd(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _mean_waits(runs: Sequence[dict[int, Waits]]) -> dict[int, Waits]:
    return {
        gpus: Waits(
            jobs=runs[0][gpus].jobs,
            mean_h=statistics.fmean(r[gpus].mean_h for r in runs),
            median_h=statistics.fmean(r[gpus].median_h for r in runs),
            p95_h=statistics.fmean(r[gpus].p95_h for r in runs),
            max_h=statistics.fmean(r[gpus].max_h for r in runs),
        )
        for gpus in runs[0]
    }


def _moved(trace: Trace, seed: str) -> Trace:
    """Submit times moved by 0 to 30 s."""
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    jobs = [
        msgspec.structs.replace(j, submit_s=j.submit_s + rng.uniform(0, 30)) for j in trace.jobs
    ]
    return msgspec.structs.replace(
        trace, jobs=tuple(sorted(jobs, key=lambda j: (j.submit_s, j.id)))
    )
