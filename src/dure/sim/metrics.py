"""What a replay was like for those who waited.

Lab ratio: GPU time received over its equal-rights max-min share of the pool, integrated
over time while the lab had demand (running + queued GPUs). Jain's index is over these.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from dure.sim.replay import Ran, Result

HOUR = 3600.0


class Waits(msgspec.Struct, frozen=True):
    """Hours waited by a group of jobs."""

    jobs: int
    mean_h: float
    median_h: float
    p95_h: float
    max_h: float


class Metrics(msgspec.Struct, frozen=True):
    """The columns of a comparison; `by_gpus` has a row per GPU count."""

    all: Waits
    by_gpus: dict[int, Waits]
    queue_empty_d: float
    utilisation: float
    jain: float
    jain_6h: float
    worst_ratio: float
    starvation_h: float
    reservations: int
    reservations_broken_share: float

    def flat(self) -> dict[str, float]:
        """The keys of `--json`."""
        eight = self.by_gpus.get(8)
        return {
            "mean_wait_h": self.all.mean_h,
            "wait_8gpu_h": eight.mean_h if eight else 0.0,
            "p95_wait_8gpu_h": eight.p95_h if eight else 0.0,
            "p95_wait_h": self.all.p95_h,
            "max_wait_h": self.all.max_h,
            "jain": self.jain,
            "jain_6h": self.jain_6h,
            "worst_ratio": self.worst_ratio,
            "starvation_h": self.starvation_h,
            "queue_empty_d": self.queue_empty_d,
            "utilisation": self.utilisation,
            "reservations_broken_share": self.reservations_broken_share,
        }


def measure(result: Result) -> Metrics:
    """All columns of one replay."""
    waits: dict[int, list[float]] = defaultdict(list)
    for ran in (r for r in result.ran if r.job.measured):
        waits[ran.job.num_gpus].append((ran.start_s - ran.job.submit_s) / HOUR)
    everything = [w for group in waits.values() for w in group]
    shares = _Shares(result)
    empty_s = queue_empty_s(result.ran)
    return Metrics(
        all=_waits(everything),
        by_gpus={n: _waits(w) for n, w in sorted(waits.items())},
        queue_empty_d=empty_s / 86_400,
        # Where nobody waited, all of the time is what there is to look at.
        utilisation=_utilisation(result, empty_s or max((r.end_s for r in result.ran), default=0)),
        jain=jain(shares.ratios()),
        jain_6h=shares.jain_windows(6 * HOUR),
        worst_ratio=min(shares.ratios(), default=1.0),
        starvation_h=shares.longest_starvation_s / HOUR,
        reservations=result.reservations,
        reservations_broken_share=result.broken / max(1, result.reservations),
    )


def _waits(hours: Sequence[float]) -> Waits:
    if not hours:
        return Waits(0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(hours)
    return Waits(
        jobs=len(ordered),
        mean_h=statistics.fmean(ordered),
        median_h=statistics.median(ordered),
        p95_h=p95(ordered),
        max_h=ordered[-1],
    )


def p95(ordered: Sequence[float]) -> float:
    """The value that 95 % of a sorted list do not exceed."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]


def jain(values: Iterable[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything."""
    xs = list(values)
    squares = sum(x * x for x in xs)
    return sum(xs) ** 2 / (len(xs) * squares) if squares else 1.0


def queue_empty_s(ran: Sequence[Ran]) -> float:
    """The last moment at which somebody waited: the last start after a real wait."""
    return max((r.start_s for r in ran if r.start_s - r.job.submit_s > 60), default=0.0)


def _utilisation(result: Result, until_s: float) -> float:
    used = sum(
        r.job.num_gpus * max(0.0, min(r.end_s, until_s) - r.start_s)
        for r in result.ran
        if r.start_s < until_s
    )
    return used / (result.gpus * until_s) if until_s else 0.0


class _Shares:
    """Demand, entitlement and use of each lab over time."""

    def __init__(self, result: Result) -> None:
        self._gpus = result.gpus
        self._labs = sorted({r.job.lab for r in result.ran})
        self._got: dict[str, float] = defaultdict(float)
        self._due: dict[str, float] = defaultdict(float)
        self.longest_starvation_s = 0.0
        self._windows: dict[int, dict[str, list[float]]] = defaultdict(
            lambda: defaultdict(lambda: [0.0, 0.0, 0.0])
        )
        self._walk(_changes(result.ran))

    def _walk(self, changes: list[tuple[float, str, int, int]]) -> None:
        queued = dict.fromkeys(self._labs, 0)
        running = dict.fromkeys(self._labs, 0)
        starving_since: dict[str, float | None] = dict.fromkeys(self._labs)
        last_s = 0.0
        for at_s, lab, queue_change, run_change in changes:
            if at_s > last_s:
                self._span(last_s, at_s, queued, running)
                last_s = at_s
            queued[lab] += queue_change
            running[lab] += run_change
            self._starve(lab, at_s, queued[lab] > 0 and running[lab] == 0, starving_since)

    def _starve(self, lab: str, at_s: float, starves: bool, since: dict[str, float | None]) -> None:
        began = since[lab]
        if starves and began is None:
            since[lab] = at_s
        elif not starves and began is not None:
            self.longest_starvation_s = max(self.longest_starvation_s, at_s - began)
            since[lab] = None

    def _span(
        self, from_s: float, to_s: float, queued: dict[str, int], running: dict[str, int]
    ) -> None:
        demand = {lab: queued[lab] + running[lab] for lab in self._labs}
        if not any(queued.values()):
            due: dict[str, float] = {lab: float(n) for lab, n in demand.items()}
        else:
            due = max_min(demand, self._gpus)
        at_s = from_s
        while at_s < to_s:
            window = int(at_s // (6 * HOUR))
            until_s = min(to_s, (window + 1) * 6 * HOUR)
            self._add(window, until_s - at_s, due, queued, running)
            at_s = until_s

    def _add(
        self,
        window: int,
        length_s: float,
        due: dict[str, float],
        queued: dict[str, int],
        running: dict[str, int],
    ) -> None:
        for lab in self._labs:
            if due[lab] or running[lab]:
                self._got[lab] += running[lab] * length_s
                self._due[lab] += due[lab] * length_s
                cell = self._windows[window][lab]
                cell[0] += running[lab] * length_s
                cell[1] += due[lab] * length_s
                cell[2] += length_s if queued[lab] else 0.0

    def ratios(self) -> list[float]:
        """GPU time received over entitlement, a lab each."""
        return [self._got[lab] / self._due[lab] for lab in self._labs if self._due[lab] > 0]

    def jain_windows(self, length_s: float) -> float:
        """Mean over windows of Jain's index over the labs that were queueing in it."""
        indices = []
        for labs in self._windows.values():
            xs = [got / due for got, due, waited in labs.values() if due > 0 and waited > 0]
            if len(xs) > 1 and length_s:
                indices.append(jain(xs))
        return statistics.fmean(indices) if indices else 1.0


def _changes(ran: Sequence[Ran]) -> list[tuple[float, str, int, int]]:
    """(time, lab, change of queued GPUs, change of running GPUs), in order."""
    changes = []
    for r in ran:
        n = r.job.num_gpus
        changes.append((r.job.submit_s, r.job.lab, n, 0))
        changes.append((r.start_s, r.job.lab, -n, n))
        changes.append((r.end_s, r.job.lab, 0, -n))
    changes.sort(key=lambda c: c[0])
    return changes


def max_min(demand: dict[str, int], capacity: float) -> dict[str, float]:
    """Equal-rights max-min shares: nobody gets more than they ask for."""
    shares: dict[str, float] = dict.fromkeys(demand, 0.0)
    open_labs = sorted((n, lab) for lab, n in demand.items() if n > 0)
    left = float(capacity)
    for place, (asked, lab) in enumerate(open_labs):
        equal = left / (len(open_labs) - place)
        shares[lab] = min(float(asked), equal)
        left -= shares[lab]
    return shares
