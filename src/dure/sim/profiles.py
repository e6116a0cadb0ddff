"""Named sets of policy settings that a simulation can compare."""

from __future__ import annotations

from dure.core.errors import DureError, ErrorCode
from dure.core.policy import BALANCED, Charging, PlacementOrder, Policy

PROFILES: dict[str, Policy] = {
    "classic": Policy(),
    "balanced": BALANCED,
    "accrued": Policy(charging=Charging.ACCRUED),
    "lookahead": Policy(charging=Charging.LOOKAHEAD),
    "lookahead-small": Policy(
        charging=Charging.LOOKAHEAD, placement_order=PlacementOrder.SMALLEST_FITTING_TIER
    ),
}


def profile(name: str) -> Policy:
    """The settings of a name; raise BAD_SETTING that lists the names there are."""
    found = PROFILES.get(name)
    if found is None:
        known = ", ".join(PROFILES)
        raise DureError(ErrorCode.BAD_SETTING, key="--policy", value=f"{name} is none of {known}")
    return found
