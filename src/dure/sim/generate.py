"""A made-up trace, for trying the simulator where no real one is at hand.

Sizes and run times are drawn from long-tailed distributions, as real clusters have them; the
same seed makes the same trace.
"""

from __future__ import annotations

import csv
import io
import random

from dure.sim.trace import COLUMNS, Trace, TraceJob

_SIZES = (1, 1, 1, 1, 1, 1, 2, 2, 4, 8)


def generate(jobs: int, labs: int, days: float, seed: int) -> Trace:
    """`jobs` jobs of `labs` labs with different appetite, over `days` days."""
    rng = random.Random(seed)  # noqa: S311 - a repeatable toy, not a secret
    names = [f"lab{i:02}" for i in range(labs)]
    appetite = [1.0 / (i + 1) for i in range(labs)]
    made = []
    for _ in range(jobs):
        lab = rng.choices(names, appetite)[0]
        made.append(
            (
                round(rng.uniform(0, days * 86_400)),
                lab,
                f"{lab}-u{rng.randrange(4)}",
                max(10, round(rng.lognormvariate(7.5, 1.8))),
                rng.choice(_SIZES),
            )
        )
    made.sort()
    return Trace(
        tuple(
            TraceJob(
                id=i, name=f"g{i}", lab=lab, user=user, submit_s=at_s, run_s=run_s, num_gpus=gpus
            )
            for i, (at_s, lab, user, run_s, gpus) in enumerate(made, 1)
        ),
        rejected=0,
    )


def as_csv(trace: Trace) -> str:
    """The trace as a file that `read_trace` reads."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for j in trace.jobs:
        model = "|".join(j.tiers)
        writer.writerow([j.name, j.lab, j.user, j.submit_s, j.run_s, j.num_gpus, model])
    return text.getvalue()
