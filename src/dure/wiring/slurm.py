"""The Slurm backend as the settings want it."""

from __future__ import annotations

import os
from pathlib import Path

from dure.adapters.compute.slurm.backend import SlurmBackend
from dure.adapters.compute.slurm.commands import Commands
from dure.adapters.compute.slurm.leases import Durations
from dure.adapters.compute.slurm.nodes import Mapped
from dure.adapters.compute.slurm.submit import Options
from dure.adapters.runtime.process import ProcessRuntime
from dure.core.errors import DureError, ErrorCode
from dure.ports import Clock
from dure.settings import Settings, SlurmSettings


def commands(settings: SlurmSettings) -> Commands:
    """Slurm's programs, as configured."""
    return Commands(bin_dir=settings.bin_dir, conf=settings.conf, timeout_s=settings.timeout_s)


def mapped(settings: SlurmSettings) -> Mapped:
    """This site's names."""
    return Mapped(
        tiers=settings.tiers,
        partitions=settings.partitions,
        preemptible=settings.preemptible,
        nodes=settings.nodes,
        reserve_mib=settings.reserve_mib,
        simulated=settings.simulated,
    )


def slurm_backend(settings: Settings, state_dir: Path, clock: Clock) -> SlurmBackend:
    """Build it; raise BAD_SETTING for what could not work."""
    slurm = settings.slurm
    if not slurm.run_root:
        raise DureError(
            ErrorCode.BAD_SETTING,
            key="slurm.run_root",
            value="is empty: name a folder on storage that the nodes share",
        )
    if slurm.as_user and os.geteuid() != 0:
        raise DureError(
            ErrorCode.BAD_SETTING,
            key="slurm.as_user",
            value="needs root; false runs every job under this server's own account",
        )
    state = state_dir / "slurm"
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    return SlurmBackend(
        Path(slurm.run_root).expanduser(),
        state,
        commands(slurm),
        ProcessRuntime(),
        clock,
        mapped=mapped(slurm),
        options=Options(
            python=slurm.python, account=slurm.account, qos=slurm.qos, as_user=slurm.as_user
        ),
        accounts=slurm.accounts,
        durations=Durations(
            query_s=slurm.query_s,
            poll_s=slurm.poll_s,
            settle_s=slurm.settle_s,
            pending_s=slurm.pending_s,
            lost_kill_s=settings.policy.stop_kill_s,
        ),
    )
