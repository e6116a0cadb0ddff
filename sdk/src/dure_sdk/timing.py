"""How often to sample: arguments, MLflow's variables, defaults, and a floor for many workers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

INTERVAL_S = 10.0
SAMPLES = 1
FREE_COLLECTORS = 4
"""Up to so many, the server takes any interval."""
FLOOR_S = 10.0
ENV_INTERVAL = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
ENV_SAMPLES = "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING"


class Timing(NamedTuple):
    """Seconds between samples, samples per point, and what the user should know about them."""

    interval_s: float
    samples: int
    lines: list[str]


def timing(
    interval: float | None,
    samples: int | None,
    collectors: int,
    environ: Mapping[str, str] | None = None,
) -> Timing:
    """Explicit arguments win over MLflow's variables, these over the defaults."""
    env = os.environ if environ is None else environ
    lines: list[str] = []
    asked_s = _pick(interval, env.get(ENV_INTERVAL), ENV_INTERVAL, INTERVAL_S, lines)
    points = _pick(samples, env.get(ENV_SAMPLES), ENV_SAMPLES, SAMPLES, lines)
    floor_s = floor(asked_s, collectors)
    if floor_s > asked_s:
        lines.append(
            f"{collectors} workers collect: one sample every {floor_s:g} s instead of {asked_s:g} s"
        )
    return Timing(floor_s, max(int(points), 1), lines)


def floor(asked_s: float, collectors: int) -> float:
    """With many collectors the interval grows, so that the server's load does not."""
    if collectors <= FREE_COLLECTORS:
        return asked_s
    return max(asked_s, FLOOR_S * -(-collectors // FREE_COLLECTORS))


def _pick(
    given: float | None, text: str | None, name: str, default: float, lines: list[str]
) -> float:
    if given is not None:
        if _positive(given):
            return float(given)
        lines.append(f"{given!r} is no usable value, {default:g} is used instead")
        return default
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not _positive(value):
        lines.append(f"{name}={text} is no usable value, {default:g} is used instead")
        return default
    lines.append(f"{name}={text} is used, since no argument says otherwise")
    return value


def _positive(value: float) -> bool:
    return 0 < value < float("inf")
