"""Every number of the policy with its unit, default and reason.

Rule: no other module of `core` holds a number that an administrator may want to change.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from dure.core.errors import DureError, ErrorCode

DAY_MS = 86_400_000


class Charging(StrEnum):
    """Which use orders the labs (P-11); charges themselves are always lazy."""

    LAZY = "lazy"
    ACCRUED = "accrued"
    LOOKAHEAD = "lookahead"


class PlacementOrder(StrEnum):
    """Which tier a job tries first."""

    BEST_TIER = "best_tier"
    SMALLEST_FITTING_TIER = "smallest_fitting_tier"


class Profile(StrEnum):
    """A named set of policy numbers; single numbers may be set beside it."""

    CLASSIC = "classic"
    BALANCED = "balanced"


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of the policy. Without arguments: profile `classic`, the policy to the letter."""

    profile: Annotated[
        Profile, Meta(description="named set of numbers; others given here go before it")
    ] = Profile.CLASSIC

    half_life_s: Annotated[float, Meta(description="usage halves in this time (P-7)")] = 604_800.0
    slots_per_user: Annotated[
        int, Meta(ge=1, description="promoted or running jobs of one user (P-2 stage)")
    ] = 4
    slots_borrow: Annotated[
        bool,
        Meta(description="promote beyond the slots while a GPU would stay idle (I6's exception)"),
    ] = False
    waiting_per_user: Annotated[
        int, Meta(ge=1, description="waiting jobs of one user; above it 429 QUEUE_LIMIT")
    ] = 1000
    max_gpus_per_job: Annotated[
        int, Meta(ge=1, le=8, description="P-3: a job asks for 1 to this many GPUs")
    ] = 8
    default_time_limit_s: Annotated[
        int, Meta(ge=0, description="limit of a job that names none; 0: none")
    ] = 0
    max_time_limit_s: Annotated[
        int, Meta(ge=0, description="above it 422 TIME_LIMIT_TOO_LONG; 0: none")
    ] = 0
    first_unix_uid: Annotated[
        int,
        Meta(
            ge=0,
            le=2_000_000_000,
            description="users without a Unix user are given the next free one from here; 0: none",
        ),
    ] = 0
    charging: Annotated[
        Charging,
        Meta(description="P-11: order by charged use, or count running jobs too"),
    ] = Charging.LAZY
    lookahead_s: Annotated[
        float, Meta(gt=0, description="P-11: horizon of `charging = lookahead`")
    ] = 86_400.0
    placement_order: Annotated[
        PlacementOrder,
        Meta(description="best GPU model first, or keep large nodes for large jobs"),
    ] = PlacementOrder.BEST_TIER
    reserve_min_gpus: Annotated[
        int,
        Meta(ge=2, description="R1: only a job of rank 1 with this many GPUs reserves; 9: none"),
    ] = 2
    keep_blocks: Annotated[
        bool,
        Meta(description="a larger job goes before a smaller one that would break up its place"),
    ] = False
    block_margin: Annotated[
        float,
        Meta(ge=0, description="doublings of lab use, per GPU of the smaller job, that it may be"),
    ] = 0.25
    age_bound_s: Annotated[
        float,
        Meta(ge=0, description="a multi-GPU job that waited this long goes first; 0: never"),
    ] = 0.0
    age_min_gpus: Annotated[
        int, Meta(ge=2, description="smallest job that age helps; smaller ones fit anywhere")
    ] = 2
    aged_reservations: Annotated[
        int, Meta(ge=0, description="jobs over the age bound that may reserve, beside R1's")
    ] = 1
    max_retries: Annotated[
        int, Meta(ge=0, description="counted failures that are repeated; the next is DEAD")
    ] = 3
    backoff_s: Annotated[
        tuple[float, ...], Meta(description="wait before the 1st, 2nd, … repeat")
    ] = (60.0, 300.0, 1200.0)
    launch_skip_s: Annotated[
        float, Meta(ge=0, description="a placement that refused a launch is skipped this long")
    ] = 60.0
    max_launch_refusals: Annotated[
        int, Meta(ge=1, description="refusals in a row before FAILED LAUNCH_FAILED")
    ] = 5
    poison_window_s: Annotated[
        float, Meta(ge=0, description="a node lost this soon after the start suggests poison")
    ] = 600.0
    poison_losses: Annotated[
        int, Meta(ge=1, description="such losses before DEAD, poison suspected")
    ] = 3
    node_wait_step_s: Annotated[
        float, Meta(gt=0, description="node_wait_count rises by one per full step of waiting")
    ] = 1800.0
    node_wait_alert_s: Annotated[
        float, Meta(gt=0, description="one alert per wait when it reaches this age")
    ] = 86_400.0
    checkpoint_s: Annotated[
        float, Meta(ge=0, description="promised to a cancelled job for its checkpoint")
    ] = 30.0
    cancel_kill_s: Annotated[
        float, Meta(ge=0, description="SIGKILL after a user's cancel, from the SIGTERM")
    ] = 300.0
    stop_kill_s: Annotated[
        float,
        Meta(ge=0, description="SIGKILL after time limit, lost lease, forced drain, leftovers"),
    ] = 30.0
    evict_grace_s: Annotated[
        float, Meta(ge=0, description="SIGKILL of an LLM replica after its SIGTERM")
    ] = 5.0

    def __post_init__(self) -> None:
        """Refuse numbers that no type can: NaN, infinities, a half-life of nothing."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, StrEnum):
                continue
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(math.isfinite(n) and n >= 0 for n in numbers):
                raise DureError(ErrorCode.BAD_SETTING, key=field.name, value=str(value))
        if self.half_life_s <= 0 or not self.backoff_s:
            raise DureError(ErrorCode.BAD_SETTING, key="half_life_s", value=str(self.half_life_s))

    @property
    def half_life_ms(self) -> float:
        """Half-life in the unit of all times."""
        return self.half_life_s * 1000

    def backoff_ms(self, failure: int) -> int:
        """Wait before repeating the `failure`-th counted failure (1, 2, …)."""
        index = min(failure, len(self.backoff_s)) - 1
        return round(self.backoff_s[index] * 1000)


_HOUR_S = 3600.0

BALANCED = Policy(
    profile=Profile.BALANCED,
    charging=Charging.LOOKAHEAD,
    lookahead_s=18 * _HOUR_S,
    placement_order=PlacementOrder.SMALLEST_FITTING_TIER,
    slots_borrow=True,
    keep_blocks=True,
    block_margin=0.1,
    # Reservations of rank 1 are broken by nearly every end of a job once many labs are
    # active; age gives the guarantee instead (docs/adr/0005).
    reserve_min_gpus=9,
    age_bound_s=132 * _HOUR_S,
    age_min_gpus=8,
    aged_reservations=1,
)
"""Profile `balanced`: long jobs count while they run, whole nodes stay whole, age helps."""

PROFILES = {Profile.CLASSIC: Policy(), Profile.BALANCED: BALANCED}


def profile_fields(name: str) -> dict[str, object]:
    """What a profile sets, as settings would; raise BAD_SETTING that lists the names there are."""
    if name not in set(Profile):
        value = f"{name} is none of {', '.join(Profile)}"
        raise DureError(ErrorCode.BAD_SETTING, key="policy.profile", value=value)
    found = PROFILES[Profile(name)]
    return {
        f.name: getattr(found, f.name)
        for f in msgspec.structs.fields(found)
        if f.name == "profile" or getattr(found, f.name) != f.default
    }
