"""Labs in the order of their use (P-8), by the use that P-11 names."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from dure.core.fairshare import ZERO_KEY, decayed_micro, use_key
from dure.core.model import JobId, Lab, LabId, Shape
from dure.core.plan import LabKey
from dure.core.policy import Charging, Policy


class _Running:
    """What a lab's running attempts cost a millisecond, and since when."""

    __slots__ = ("attempts", "rate", "rate_start")

    def __init__(self) -> None:
        self.attempts: dict[tuple[JobId, int], tuple[int, int]] = {}
        self.rate = 0
        self.rate_start = 0

    def add(self, key: tuple[JobId, int], rate: int, start_ms: int) -> None:
        self.attempts[key] = (rate, start_ms)
        self.rate += rate
        self.rate_start += rate * start_ms

    def drop(self, key: tuple[JobId, int]) -> None:
        rate, start_ms = self.attempts.pop(key)
        self.rate -= rate
        self.rate_start -= rate * start_ms


class LabOrder:
    """Labs by use ÷ weight; those with equal keys share a line.

    With `lazy` charging a key never changes but by a charge. Otherwise the keys of labs
    that run something are made anew whenever time passes.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._labs: dict[LabId, Lab] = {}
        self._keys: dict[LabId, int] = {}
        self._order: list[tuple[int, LabId]] = []
        self._running: dict[LabId, _Running] = {}
        self._lab_of: dict[tuple[JobId, int], LabId] = {}
        self._now_ms = 0

    def __contains__(self, lab: LabId) -> bool:
        return lab in self._keys

    def put(self, lab: Lab) -> None:
        """Take a lab's usage, weight and limits; moves only this lab in the line."""
        self._labs[lab.name] = lab
        self._place(lab.name)

    def started(self, key: tuple[JobId, int], lab: LabId, rate: int, at_ms: int) -> None:
        """An attempt of `lab` costs `rate` (GPUs x milli-TFLOPS) from `at_ms` on."""
        if self._policy.charging is Charging.LAZY or key in self._lab_of:
            return
        self._lab_of[key] = lab
        self._running.setdefault(lab, _Running()).add(key, rate, at_ms)
        if lab in self._labs:
            self._place(lab)

    def ended(self, key: tuple[JobId, int]) -> None:
        """An attempt costs nothing more; its charge comes with the lab."""
        lab = self._lab_of.pop(key, None)
        if lab is not None:
            self._running[lab].drop(key)
            if not self._running[lab].attempts:
                del self._running[lab]
            self._place(lab)

    def advance(self, now_ms: int) -> None:
        """Let time pass: what runs has cost more."""
        if now_ms != self._now_ms:
            self._now_ms = now_ms
            for lab in self._running:
                self._place(lab)

    def key(self, lab: LabId) -> int:
        """A lab's order key; labs not seen yet have used nothing."""
        return self._keys.get(lab, ZERO_KEY)

    def keys(self) -> tuple[LabKey, ...]:
        """All labs with their keys, in order."""
        if self._policy.charging is not Charging.LOOKAHEAD:
            return tuple(LabKey(lab=lab, key=key) for key, lab in self._order)
        return tuple(
            LabKey(lab=lab, key=key, use_micro=self._use(lab), weight=self._labs[lab].weight)
            for key, lab in self._order
        )

    def groups(self) -> Iterator[list[LabId]]:
        """Labs in order; those with equal use together."""
        for _, labs in groupby(self._order, key=itemgetter(0)):
            yield [lab for _, lab in labs]

    def within_limit(self, lab: LabId, shape: Shape) -> bool:
        """Whether a lab's own limit allows this many GPUs in one job."""
        known = self._labs.get(lab)
        limit = known.limits.num_gpus if known else None
        return limit is None or shape.num_gpus <= limit

    def _use(self, lab: LabId) -> float:
        """Use of now in 1e-6 TFLOP-s, what runs counted as the policy says."""
        known = self._labs[lab]
        use = decayed_micro(known, self._now_ms, self._policy.half_life_ms)
        running = self._running.get(lab)
        if running is None:
            return use
        until_ms = self._now_ms
        if self._policy.charging is Charging.LOOKAHEAD:
            until_ms += round(self._policy.lookahead_s * 1000)
        # In integers: the two products are far beyond what a float tells apart.
        return use + max(0, until_ms * running.rate - running.rate_start)

    def _place(self, lab: LabId) -> None:
        known = self._labs.get(lab) or Lab(name=lab)
        self._labs.setdefault(lab, known)
        half_life_ms = self._policy.half_life_ms
        if lab in self._running:
            key = use_key(self._use(lab), known.weight, self._now_ms, half_life_ms)
        else:
            key = use_key(known.usage_micro, known.weight, known.as_of_ms, half_life_ms)
        old = self._keys.get(lab)
        if old == key:
            return
        if old is not None:
            self._order.pop(bisect_left(self._order, (old, lab)))
        self._keys[lab] = key
        insort(self._order, (key, lab))
