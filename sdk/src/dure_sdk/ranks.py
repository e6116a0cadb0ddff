"""Which worker this process is: the one place that knows Ray Train, torchrun and Slurm.

Rule: the environment of this process decides, never a message from another one. A collective
can stop training, and an answer that depends on who came first is no truth.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Rank(NamedTuple):
    """Place of one worker among all. `None` = cannot be known here."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int | None = 1
    source: str = "single"

    @property
    def first_here(self) -> bool:
        """Whether this worker speaks for its pod; unknown means yes: rather twice than never."""
        return not self.local_rank

    @property
    def pods(self) -> int:
        """How many workers collect when all may: one per pod, or all where that is unknown."""
        return -(-self.world_size // (self.local_world_size or 1))


def current(environ: Mapping[str, str] | None = None) -> Rank:
    """The rank of this process: Ray Train, else torchrun's names, else Slurm's, else alone."""
    env = os.environ if environ is None else environ
    return _ray_train() or _torchrun(env) or _slurm(env) or Rank()


def _ray_train() -> Rank | None:
    # Only if the program itself uses Ray Train: importing it costs seconds.
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context: Any = train.get_context()
        return Rank(
            int(context.get_world_rank()),
            int(context.get_world_size()),
            int(context.get_local_rank()),
            int(context.get_local_world_size()),
            "ray",
        )
    except (RuntimeError, AttributeError, TypeError, ValueError):
        return None  # not inside a worker


def _torchrun(env: Mapping[str, str]) -> Rank | None:
    rank = _number(env, "RANK")
    if rank is None:
        return None
    return Rank(
        rank,
        _number(env, "WORLD_SIZE") or rank + 1,
        _number(env, "LOCAL_RANK"),
        _number(env, "LOCAL_WORLD_SIZE"),
        "torchrun",
    )


def _slurm(env: Mapping[str, str]) -> Rank | None:
    rank = _number(env, "SLURM_PROCID")
    if rank is None:
        return None
    return Rank(
        rank,
        _number(env, "SLURM_STEP_NUM_TASKS") or _number(env, "SLURM_NTASKS") or rank + 1,
        _number(env, "SLURM_LOCALID"),
        _slurm_tasks_here(env),
        "slurm",
    )


def _slurm_tasks_here(env: Mapping[str, str]) -> int | None:
    """Slurm says `2(x3),1`; only an even spread tells how many collectors there are."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    first = text.split("(", maxsplit=1)[0]
    return int(first) if first.isdigit() and "," not in text else None


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    return int(text) if text.isdigit() else None
