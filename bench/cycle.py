"""One dispatch cycle: thread time with 1k, 100k, 1M waiting jobs and no idle GPU, decisions.

Slots are lifted: all jobs stand in the global queue. Last line: one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import time
from pathlib import Path

from dure.core.model import Gpu, JobState, JobView, Lab, Lease, Node, Shape, Tier
from dure.core.placement import Pool
from dure.core.policy import Policy
from dure.core.queues import QueueIndex
from dure.core.scheduler import plan

POLICY = Policy()
TIERS = [
    Tier(name="RTX4090", vram_gb=24, mtflops=82_600, sort_order=20, max_gpus=8),
    Tier(name="RTX3080Ti", vram_gb=12, mtflops=34_100, sort_order=10, max_gpus=2),
]


def make_pool(nodes: int) -> Pool:
    """`nodes` machines of 8 GPUs, alternating tiers."""
    pool = Pool()
    for tier in TIERS:
        pool.put_tier(tier)
    for i in range(nodes):
        tier = TIERS[i % 2].name
        gpus = tuple(Gpu(index=k, tier=tier) for k in range(8))
        pool.put_node(Node(name=f"n{i:03}", backend="simulated", gpus=gpus, memory_mib=64_000))
    return pool


def fill(pool: Pool) -> None:
    """Take every GPU."""
    for i, view in enumerate(pool.views()):
        pool.take(Lease(job=10_000_000 + i, epoch=1, placement=view.id, gpus=view.free))


def make_index(waiting: int, labs: int = 12) -> QueueIndex:
    """`waiting` jobs of `labs` labs with different use and a dozen shapes."""
    rng = random.Random(0)
    index = QueueIndex(POLICY)
    for i in range(labs):
        index.put_lab(Lab(name=f"L{i:02}", usage_micro=1e9 * (i + 1)))
    shapes = [
        Shape(num_gpus=n, floor_gb=f, tiers=t)
        for n in (1, 1, 1, 2, 4)
        for f in (0, 16)
        for t in ((), ("RTX4090",))
    ]
    for i in range(waiting):
        index.put(
            JobView(
                id=i + 1,
                lab=f"L{rng.randrange(labs):02}",
                user="u",
                state=JobState.GLOBAL_QUEUE_WAIT,
                shape=rng.choice(shapes),
                entered_ms=i,
            )
        )
    return index


def cycle(index: QueueIndex, pool: Pool) -> int:
    """What the controller does in a cycle before it writes."""
    index.presence_changes(pool)
    return len(plan(index.snapshot(pool, 1), POLICY).decisions)


def empty_cycle_ms(index: QueueIndex, pool: Pool, rounds: int = 2000) -> tuple[float, float]:
    """p50 and p99 of thread time, no GPU idle."""
    times = []
    for _ in range(rounds):
        began = time.thread_time_ns()
        cycle(index, pool)
        times.append((time.thread_time_ns() - began) / 1e6)
    times.sort()
    return statistics.median(times), times[int(rounds * 0.99)]


def rss_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def decisions_per_s(index: QueueIndex) -> tuple[float, int]:
    """A whole idle pool of 320 GPUs handed out in one cycle, best of 20."""
    pool = make_pool(40)
    best, count = float("inf"), 0
    for _ in range(20):
        began = time.perf_counter()
        count = cycle(index, pool)
        best = min(best, time.perf_counter() - began)
    return count / best, count


def main() -> None:
    """Measure and print."""
    metrics: dict[str, float] = {}
    pool = make_pool(40)
    fill(pool)
    for waiting, label in ((1_000, "1k"), (100_000, "100k"), (1_000_000, "1m")):
        gc.collect()
        before = rss_mib()
        index = make_index(waiting)
        metrics[f"rss_mib_{label}"] = round(rss_mib(), 1)
        metrics[f"index_mib_{label}"] = round(rss_mib() - before, 1)
        p50, p99 = empty_cycle_ms(index, pool)
        metrics[f"empty_cycle_{label}_ms_p50"] = round(p50, 4)
        metrics[f"empty_cycle_{label}_ms_p99"] = round(p99, 4)
        rate, count = decisions_per_s(index)
        metrics[f"decisions_per_s_{label}"] = round(rate)
        print(
            f"{waiting:>9} waiting: empty cycle p50 {p50:.4f} ms p99 {p99:.4f} ms thread time; "
            f"{count} decisions at {rate:,.0f}/s; index {metrics[f'rss_mib_{label}']} MiB"
        )
        del index
    metrics["decisions_per_s"] = metrics["decisions_per_s_100k"]
    print(json.dumps({"name": "cycle", "metrics": metrics}))


if __name__ == "__main__":
    main()
