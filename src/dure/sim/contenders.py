"""Who is compared: named policies of the planner, and yardsticks that only the simulator knows."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from dure.core.policy import BALANCED, Charging, PlacementOrder, Policy
from dure.sim.refusals import Refusal, SimulationRefused


class Line(StrEnum):
    """Whose turn it is: the planner's order, or one of two kinds of first come, first served."""

    PLANNER = "planner"
    FIFO = "fifo"
    """The planner's loop with everybody in one lab: by time of entry, later jobs may pass."""
    STRICT = "strict"
    """By time of entry, and nobody passes the head."""


class Contender(msgspec.Struct, frozen=True):
    """A name in the comparison and what it stands for."""

    name: str
    policy: Policy
    line: Line = Line.PLANNER


_NAMED = (
    Contender("classic", Policy()),
    Contender("balanced", BALANCED),
    Contender("accrued", Policy(charging=Charging.ACCRUED)),
    Contender("lookahead", Policy(charging=Charging.LOOKAHEAD)),
    Contender(
        "lookahead-small",
        Policy(charging=Charging.LOOKAHEAD, placement_order=PlacementOrder.SMALLEST_FITTING_TIER),
    ),
    Contender("fifo", Policy(), Line.FIFO),
    Contender("fifo-strict", Policy(), Line.STRICT),
)
CONTENDERS = {c.name: c for c in _NAMED}


def contender(name: str) -> Contender:
    """The contender of a name; refuse UNKNOWN_POLICY with the names there are."""
    found = CONTENDERS.get(name)
    if found is None:
        raise SimulationRefused(Refusal.UNKNOWN_POLICY, name=name, known=", ".join(CONTENDERS))
    return found
