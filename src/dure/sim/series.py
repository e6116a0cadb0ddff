"""What charts show of a replay: waits as a distribution, use and queue over time."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from dure.sim.metrics import queue_empty_s
from dure.sim.replay import Ran, Result

BINS = 120
OTHERS = ""
"""Stands for all labs that have no line of their own."""
Spans = Iterable[tuple[float, float, int]]
"""(from, to, GPUs)."""


class OverTime(msgspec.Struct, frozen=True):
    """GPUs of each lab, mean of each of `BINS` equal pieces of time."""

    running: dict[str, list[float]]
    waiting: dict[str, list[float]]


def share_started(result: Result, after_h: Sequence[float]) -> list[float]:
    """Share of the jobs that had started within each of these times."""
    ran = [r for r in result.ran if r.job.measured]
    waits = sorted((r.start_s - r.job.submit_s) / 3600 for r in ran)
    return [bisect_right(waits, h) / max(1, len(waits)) for h in after_h]


def horizon_s(results: Iterable[Result]) -> float:
    """Until when charts go: everybody submitted, nobody waits, and a little more.

    Without it a single job of two months would squeeze the days that matter.
    """
    ends = [
        max(queue_empty_s(r.ran), max((x.job.submit_s for x in r.ran), default=0.0))
        for r in results
    ]
    return max(1.05 * max(ends, default=0.0), 60.0)


def largest_labs(result: Result, count: int) -> list[str]:
    """The labs with most GPU time, and OTHERS if there are more."""
    used: dict[str, float] = defaultdict(float)
    for r in result.ran:
        used[r.job.lab] += r.job.num_gpus * (r.end_s - r.start_s)
    order = sorted(used, key=lambda lab: (-used[lab], lab))
    return order if len(order) <= count else [*order[: count - 1], OTHERS]


def over_time(result: Result, labs: Sequence[str], until_s: float) -> OverTime:
    """GPUs used and waited for by each of `labs`, in order; the rest is OTHERS."""
    groups: dict[str, list[Ran]] = {lab: [] for lab in labs}
    for r in result.ran:
        groups[r.job.lab if r.job.lab in groups else OTHERS].append(r)
    return OverTime(
        running={
            lab: binned(((r.start_s, r.end_s, r.job.num_gpus) for r in ran), until_s)
            for lab, ran in groups.items()
        },
        waiting={
            lab: binned(((r.job.submit_s, r.start_s, r.job.num_gpus) for r in ran), until_s)
            for lab, ran in groups.items()
        },
    )


def in_use(result: Result, until_s: float) -> list[float]:
    """Share of all GPUs that ran jobs, over time."""
    held = binned(((r.start_s, r.end_s, r.job.num_gpus) for r in result.ran), until_s)
    return [n / max(1, result.gpus) for n in held]


def binned(spans: Spans, until_s: float) -> list[float]:
    """Mean height over each piece of time of a pile of spans.

    Whole pieces are summed as differences, so that a long span costs as much as a short one.
    """
    piece_s = until_s / BINS
    partly = [0.0] * BINS
    whole = [0.0] * (BINS + 1)
    for from_s, to_s, gpus in spans:
        first, last = max(0.0, from_s) / piece_s, min(to_s, until_s) / piece_s
        if last <= first:
            continue
        a, b = int(first), min(int(last), BINS - 1)
        if a == b:
            partly[a] += gpus * (last - first)
            continue
        partly[a] += gpus * (a + 1 - first)
        partly[b] += gpus * (last - b)
        whole[a + 1] += gpus
        whole[b] -= gpus
    return [part + full for part, full in zip(partly, accumulate(whole[:BINS]), strict=True)]
