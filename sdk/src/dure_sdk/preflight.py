"""What a job would record, told before it runs: the real list of series, rows, charts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dure_sdk.dictionary import expected
from dure_sdk.names import PREFIX, renamer, safe_node
from dure_sdk.timing import timing

if TYPE_CHECKING:
    from collections.abc import Sequence


class Preflight(NamedTuple):
    """The volume of one run."""

    series: list[str]
    collectors: int
    interval_s: float
    samples: int
    rows_per_hour: int
    charts: int

    def __str__(self) -> str:
        head = (
            f"{self.collectors} collecting worker(s), one point every "
            f"{self.interval_s * self.samples:g} s: {len(self.series)} series, "
            f"{self.rows_per_hour} rows an hour, {self.charts} charts"
        )
        return "\n".join([head, *(f"  {name}" for name in self.series)])


def expect(
    *,
    workers: int = 1,
    workers_per_pod: int = 1,
    all_workers: bool = False,
    interval: float | None = None,
    samples: int | None = None,
    gpus_per_pod: int = 0,
    memory_limit: bool = False,
    cpu_quota: bool = False,
    pressure: bool = False,
    nodes: Sequence[str] = (),
    node_agent: bool = False,
) -> Preflight:
    """Series, rows an hour and charts of a job. `nodes` are those of its pods, in order."""
    pods = -(-workers // workers_per_pod) if all_workers else 1
    times = timing(interval, samples, pods)
    table = expected(
        gpus=gpus_per_pod,
        memory=memory_limit,
        cpu=cpu_quota,
        psi=pressure,
        node=not node_agent,
    )
    names: list[str] = []
    for pod in range(pods):
        node = safe_node(nodes[pod]) if pod < len(nodes) else None
        rename = renamer(pod * workers_per_pod, node)
        names += [PREFIX + str(rename(series.name)) for series in table]
    points_per_hour = 3600 / (times.interval_s * times.samples)
    return Preflight(
        names,
        pods,
        times.interval_s,
        times.samples,
        round(len(names) * points_per_hour),
        len(names),
    )
