"""What this machine grants to one attempt: its user, its limits, the folders it may name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from dure.adapters.compute.local.rundir import Layout, Limits, RunDir
from dure.adapters.runtime.host import gpu_devices, inside
from dure.core.model import Gpu, Node, Value
from dure.ports import Grant, LaunchOrder

_VAR = ("backups", "cache", "lib", "log", "mail", "spool")
CLOSED = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", *(f"/var/{name}" for name in _VAR))
"""System folders that no job may name, whoever owns them; a site may share parts of them."""


class Confinement(Value, frozen=True, kw_only=True):
    """Limits and permissions of jobs on this machine; the defaults confine nothing."""

    uid: int = -1
    """The server's own user."""
    state_dir: str = ""
    home: str = ""
    """The server's own home folder: what is hidden in it stays hidden."""
    workdirs: tuple[str, ...] = ()
    """Folders in which a workdir may lie whoever owns it."""
    controllers: Layout | None = None
    """Where control groups may be made; None: nowhere, so nothing is limited."""
    processes: int = 0
    output_limit_mib: int = 0
    log_limit_mib: int = 0
    quota_every_s: float = 5.0
    """How often an output folder is measured."""
    devices: str = "/dev"

    def user(self, order: LaunchOrder) -> int:
        """Whom the job becomes; only root can be somebody else. 0: the server's own user."""
        return self.runs_as(order.unix_uid)

    def runs_as(self, unix_uid: int) -> int:
        """The Unix user that jobs of somebody with `unix_uid` get here."""
        return unix_uid if self.uid == 0 else 0

    def grant(
        self, order: LaunchOrder, run: RunDir, node: Node, *, data_mib: int, confines: bool
    ) -> Grant:
        """Everything that depends on this machine."""
        grouped = self.controllers is not None
        return Grant(
            run_dir=str(run.path),
            output_dir=str(run.out),
            gpu_uuids=() if order.simulated else _uuids(order, node.gpus),
            cores=order.cores,
            memory_mib=order.memory_mib,
            data_limit_mib=data_mib,
            devices=() if order.simulated else gpu_devices(order.gpus, self.devices),
            uid=self.user(order) if confines else 0,
            processes=0 if grouped else self.processes,
        )

    def group(self, run: RunDir) -> Layout | None:
        """Folders of the attempt's own group, named so that no other server has them."""
        if self.controllers is None:
            return None
        digest = hashlib.sha256(str(run.path).encode()).hexdigest()[:12]
        name = f"{run.path.parent.name}-{run.path.name}-{digest}"
        folders = {c: f"{folder}/{name}" for c, folder in self.controllers.folders.items()}
        return Layout(version=self.controllers.version, folders=folders)

    def limits(self, order: LaunchOrder) -> Limits:
        """P-5's share, and a bound on processes."""
        return Limits(memory_mib=order.memory_mib, cores=order.cores, processes=self.processes)

    def unfit(self, order: LaunchOrder, *, confines: bool) -> str:
        """Why this order cannot be launched here; empty if it can."""
        if not order.command:
            return "the command is empty"
        return self.refusal(order.workdir, self.user(order), confines=confines)

    def refusal(self, workdir: str, uid: int, *, confines: bool) -> str:
        """Why no job of this user can start in `workdir`; empty if one can."""
        if not workdir:
            return ""
        try:
            if not Path(workdir).is_dir():
                return f"workdir {workdir} is not a folder on this machine"
            real = os.path.realpath(workdir)
        except (OSError, ValueError) as error:
            return f"workdir {workdir} cannot be used: {error}"
        if not os.access(workdir, os.R_OK | os.X_OK):
            return f"workdir {workdir} cannot be read"
        # Under another name the server's own folder could not be hidden in it.
        hides = inside(self.state_dir, real) and real != workdir
        if confines and (hides or not self._may_see(real, uid)):
            return (
                f"workdir {workdir} may not be shown to this job: start it in a folder of your own"
                " (not a home itself, nor a hidden folder in it), or ask an administrator to"
                " allow it with `workdirs` of [node]"
            )
        return ""

    def _may_see(self, folder: str, uid: int) -> bool:
        """A jail must not be a way to folders that its user could not read outside."""
        if inside(folder, self.state_dir):
            return False
        if any(inside(folder, allowed) for allowed in self.workdirs):
            return True
        closed = folder.count("/") < 2 or any(inside(folder, top) for top in CLOSED)
        own = Path(folder).stat().st_uid == (uid or self.uid)
        return own and not closed and not self._private(folder)

    def _private(self, folder: str) -> bool:
        """The server's home itself, and hidden folders in it: keys and tokens lie there."""
        if not self.home or not inside(folder, self.home):
            return False
        below = folder[len(self.home) :].strip("/")
        return not below or any(part.startswith(".") for part in below.split("/"))


def _uuids(order: LaunchOrder, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    by_index = {gpu.index: gpu.uuid for gpu in gpus}
    return tuple(by_index.get(index) or str(index) for index in order.gpus)
