"""Decayed use, its order, and the exact charge (P-6, P-7, P-8).

All labs decay by one factor, so decay alone never changes an order: a lab is ordered by
log2(usage / weight) + as_of / half-life, which neither overflows nor underflows.
"""

from __future__ import annotations

import math

from dure.core.errors import DureError, ErrorCode
from dure.core.model import Lab, LedgerEntry

ZERO_KEY = -(1 << 62)
"""Order key of a lab that never used anything: before every other."""
_GRID = 1e9
"""Keys are compared on a grid, so that equal use booked in other steps is equal."""


def check_weight(weight: float) -> float:
    """Return a usable weight; refuse 0, negative, NaN and infinite ones."""
    if not math.isfinite(weight) or weight <= 0:
        raise DureError(ErrorCode.INVALID_REQUEST, field="weight", problem="positive_number")
    return weight


def decayed_micro(lab: Lab, at_ms: int, half_life_ms: float) -> float:
    """Usage in 1e-6 TFLOP-s at `at_ms`. A clock that stepped back decays nothing."""
    age_ms = max(0, at_ms - lab.as_of_ms)
    # One power of the whole span: three half-lives give 0.5**3, not 0.5**5 (flux #816).
    return float(lab.usage_micro * 0.5 ** (age_ms / half_life_ms))


def book(lab: Lab, cost_micro: int, at_ms: int, half_life_ms: float) -> Lab:
    """Return the lab with `cost_micro` added at `at_ms`.

    A cost booked earlier than `as_of_ms` (clock stepped back, another server) is decayed
    to it, so the order of bookings does not matter.
    """
    if cost_micro == 0:
        return lab
    as_of_ms = max(lab.as_of_ms, at_ms) if lab.usage_micro > 0 else at_ms
    old = decayed_micro(lab, as_of_ms, half_life_ms)
    new = cost_micro * 0.5 ** ((as_of_ms - at_ms) / half_life_ms)
    return Lab(
        name=lab.name,
        title=lab.title,
        weight=lab.weight,
        limits=lab.limits,
        usage_micro=old + new,
        as_of_ms=as_of_ms,
    )


def order_key(lab: Lab, half_life_ms: float) -> int:
    """Position of a lab in the line: smaller goes first, equal keys form one line.

    Independent of now, because decay is common to all labs.
    """
    return use_key(lab.usage_micro, lab.weight, lab.as_of_ms, half_life_ms)


def use_key(use_micro: float, weight: float, as_of_ms: int, half_life_ms: float) -> int:
    """Order key of a use that is exact at `as_of_ms`."""
    if use_micro <= 0:
        return ZERO_KEY
    log_use = math.log2(use_micro) - math.log2(weight)
    return round((log_use + as_of_ms / half_life_ms) * _GRID)


def recomputed(lab: Lab, entries: list[LedgerEntry], half_life_ms: float) -> Lab:
    """Usage of `lab` from its ledger lines alone, for the audit."""
    fresh = Lab(name=lab.name, weight=lab.weight)
    for entry in sorted(entries, key=lambda e: e.booked_ms):
        fresh = book(fresh, entry.cost_micro, entry.booked_ms, half_life_ms)
    return fresh
