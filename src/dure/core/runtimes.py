"""How long jobs run: quantiles of the owner's past runs, within the time limit.

What is like a new job: the same person's jobs of the same size, else the person's, else the
lab's, else anybody's. At least three runs are needed to say anything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable

from dure.core.model import LabId, UserId

_KEPT = 40
"""Runs remembered for each kind: enough for a quintile, few enough to follow a change."""
_ENOUGH = 3


class RunTimes:
    """Past runs by who and how large; a question costs one sort of at most forty numbers."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, deque[int]] = {}

    def note(self, user: UserId, lab: LabId, num_gpus: int, run_ms: int) -> None:
        """Remember one run that ended by itself."""
        for key in _keys(user, lab, num_gpus):
            self._runs.setdefault(key, deque(maxlen=_KEPT)).append(max(1, run_ms))

    def quantile_ms(
        self,
        user: UserId,
        lab: LabId,
        num_gpus: int,
        *,
        share: float,
        elapsed_ms: int = 0,
        limit_ms: int | None = None,
    ) -> int | None:
        """Whole run time at a quantile (`share` 0 to 1), given that `elapsed_ms` are over.

        None: nobody knows (too few runs, and no time limit). A job that has outlived all
        runs like it is expected to run as long again, at most to its limit.
        """
        runs = next((r for k in _keys(user, lab, num_gpus) if len(r := self._of(k)) >= _ENOUGH), [])
        if not runs:
            return limit_ms
        left = runs[bisect_right(runs, elapsed_ms) :]
        found = left[min(len(left) - 1, int(len(left) * share))] if left else 2 * elapsed_ms
        return found if limit_ms is None else min(found, max(limit_ms, elapsed_ms))

    def _of(self, key: Hashable) -> list[int]:
        return sorted(self._runs.get(key, ()))


def _keys(user: UserId, lab: LabId, num_gpus: int) -> tuple[Hashable, ...]:
    return (("user", user, num_gpus), ("user", user), ("lab", lab), ())
