"""When a waiting job may start: a band, kept, and scored by what came true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dure.core.model import JobId, Value
from dure.core.rehearsal import Start

NEVER_MS = 1 << 53
"""Run time of a job of which nothing is known: nobody may wait for its end."""


class Forecast(Value, frozen=True, kw_only=True):
    """P20, P50 and P80 of a job's start, made once for each time it enters the queue.

    A later quantile is None when it hangs on a job whose run time nobody knows. `after` is the job
    whose end it most often waits for. `started_ms` is filled in by what came true; 0: the job
    left the queue without starting.
    """

    job: JobId
    entered_ms: int
    made_ms: int
    p20_ms: int
    p50_ms: int | None
    p80_ms: int | None
    after: JobId | None = None
    started_ms: int | None = None


class Calibration(Value, frozen=True, kw_only=True):
    """How often starts fell inside their P20-P80 band; 0.6 is honest."""

    scored: int
    inside: int
    early: int
    late: int

    @property
    def inside_share(self) -> float | None:
        """Share of scored starts inside the band."""
        return self.inside / self.scored if self.scored else None


def share_of(job: JobId, scenario: int, scenarios: int) -> float:
    """The run-time quantile of `job` in one of `scenarios`.

    Each job meets each stratum once, in an order of its own: spread without randomness, so
    that the same question has the same answer.
    """
    turn = (int(job) * 2_654_435_761 >> 8) % scenarios
    return ((scenario + turn) % scenarios + 0.5) / scenarios


def forecast(
    job: JobId, entered_ms: int, made_ms: int, starts: Sequence[Start | None]
) -> Forecast | None:
    """The band of one job from its starts in all scenarios; None if even P20 is unknown."""
    times = sorted(s.at_ms if s is not None else NEVER_MS for s in starts)
    if not times or times[0] >= NEVER_MS:
        return None
    causes = Counter(s.after for s in starts if s is not None and s.after is not None)
    p20, p50, p80 = (_quantile(times, share) for share in (0.2, 0.5, 0.8))
    if p20 is None:
        return None
    return Forecast(
        job=job,
        entered_ms=entered_ms,
        made_ms=made_ms,
        p20_ms=p20,
        p50_ms=p50,
        p80_ms=p80,
        after=min(causes, key=lambda c: (-causes[c], c)) if causes else None,
    )


def _quantile(times: Sequence[int], share: float) -> int | None:
    found = times[min(len(times) - 1, int(len(times) * share))]
    # A job that nobody knows the end of ends "never"; what follows it is unknown, too.
    return None if found >= NEVER_MS else found


def calibration(forecasts: Iterable[Forecast]) -> Calibration:
    """Score the forecasts whose job started and whose band was known."""
    early = inside = late = 0
    for made in forecasts:
        if not made.started_ms or made.p80_ms is None:
            continue
        if made.started_ms < made.p20_ms:
            early += 1
        elif made.started_ms > made.p80_ms:
            late += 1
        else:
            inside += 1
    return Calibration(scored=early + inside + late, inside=inside, early=early, late=late)
