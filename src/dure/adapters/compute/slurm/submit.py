"""The sbatch call of an attempt, as text. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path

from dure.adapters.compute.slurm.site import Launched
from dure.core.model import Value

SPARE_MIN = 10
"""Minutes that Slurm's time limit lies behind Dure's, which is exact and lets jobs save."""


class Options(Value, frozen=True, kw_only=True):
    """What a site adds to each job."""

    python: str = "/usr/bin/python3"
    account: str = ""
    qos: str = ""
    as_user: bool = True
    """Submit under the job's own account, which only root may."""


def time_limit_min(order_s: float | None, kill_after_s: float) -> int | None:
    """Minutes to ask of Slurm; None: as long as the partition allows."""
    if order_s is None:
        return None
    return -(-int(order_s + kill_after_s) // 60) + SPARE_MIN


def argv(launched: Launched, folder: Path, comment: str, options: Options) -> list[str]:
    """The whole command. Nothing that a user wrote stands in it."""
    order, account = launched.order, launched.account
    kind = f":{launched.gres_type}" if launched.gres_type else ""
    words = [
        "sbatch",
        "--parsable",
        f"--job-name=dure-{order.key.job}-{order.key.epoch}",
        f"--comment={comment}",
        f"--partition={launched.partition}",
        f"--nodelist={order.placement.node}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={order.cores}",
        f"--gres=gpu{kind}:{len(order.gpus)}",
        "--no-requeue",
        "--open-mode=append",
        # sbatch itself gets a clean environment, and NONE would load a login shell's.
        "--export=ALL",
        "--chdir=/",
        "--input=/dev/null",
        f"--output={folder}/run/slurm.out",
    ]
    if launched.time_limit_min is not None:
        words.append(f"--time={launched.time_limit_min}")
    if order.memory_mib:
        words.append(f"--mem={order.memory_mib}M")
    if options.account:
        words.append(f"--account={options.account}")
    if options.qos:
        words.append(f"--qos={options.qos}")
    if options.as_user:
        words += [f"--uid={account.uid}", f"--gid={account.gid}"]
    return words


def script(folder: Path, batch: Path, options: Options) -> str:
    """The batch script; a stop signal that comes before Python is up must not kill it."""
    program = shlex.join([options.python, "-I", "-S", "-X", "utf8", str(batch), str(folder)])
    return f"#!/bin/sh\ntrap '' USR1\nexec {program}\n"


def job_id(out: str) -> int:
    """What `sbatch --parsable` printed (`id` or `id;cluster`); 0: nothing of the kind."""
    text = out.strip().split(";")[0]
    return int(text) if text.isdigit() else 0
