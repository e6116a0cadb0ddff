"""Real jails of this machine under the real backend, for the tests of this folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dure.adapters.compute.local import controllers
from dure.adapters.compute.local.backend import LocalBackend
from dure.adapters.compute.local.cgroups import Group
from dure.adapters.compute.local.confinement import Confinement
from dure.adapters.compute.local.gpus import Declared, Machine, Probe
from dure.adapters.compute.local.watch import Durations
from dure.adapters.runtime import host
from dure.adapters.runtime.apptainer import ApptainerRuntime, make_root
from dure.adapters.runtime.choose import bubblewrap
from dure.adapters.runtime.jail import Yard
from dure.adapters.runtime.process import ProcessRuntime
from dure.ports import LeaseKey, Runtime, StopKind, StopOrder
from tests.contract.backends import LocalRig, order

ROOT = Path(__file__).resolve().parents[2]
UID, OTHER = 64_111, 64_112
"""Users that exist nowhere: a jail's user needs no account."""
IS_ROOT = os.getuid() == 0


def apptainer_program() -> str:
    """Where Apptainer is; skip with the reason if it could not be had."""
    own = ROOT / "var" / "apptainer"
    program = shutil.which("apptainer") or str(own / "bin" / "apptainer")
    if not Path(program).exists():
        why = own / "why"
        pytest.skip(
            why.read_text().strip() if why.exists() else "no Apptainer: run tools/get-apptainer.sh"
        )
    user = {"user": UID, "group": UID, "extra_groups": []} if IS_ROOT else {}
    # It refuses to run for a user without an account, so only its file is tried.
    if subprocess.run(["test", "-x", program], check=False, **user).returncode:
        pytest.skip(f"{program} lies where no other user may run it")
    return program


def need_root() -> None:
    if not IS_ROOT:
        pytest.skip("only root can start a job as another user")


def need_cgroups() -> None:
    found = controllers.find(os.environ.get("DURE_CGROUP_ROOT", ""))
    if found.layout is None:
        pytest.skip(f"no control group can be made here: {found.problem}")


class JailRig(LocalRig):
    """`kind` is process, bubblewrap, bubblewrap-root or apptainer."""

    durations = Durations(
        start_s=8, leftover_kill_s=1, lost_kill_s=1, beat_s=5, poll_s=0.02, node_s=5
    )

    def __init__(self, kind: str, folder: Path, **confinement: object) -> None:
        self.kind = kind
        self.confinement = confinement
        if kind == "bubblewrap-root":
            need_root()
        as_user = IS_ROOT and kind in ("bubblewrap-root", "apptainer")
        self.uid = UID if as_user else 0
        super().__init__(folder)

    def runtime(self) -> Runtime:
        yard = Yard(host=host.look(), state_dir=str(self.root.parent))
        if self.kind == "process":
            return ProcessRuntime({"PATH": os.environ["PATH"]})
        if self.kind == "apptainer":
            program = apptainer_program()
            return ApptainerRuntime(yard, program=program, root=make_root(yard), uid=os.getuid())
        made = bubblewrap(yard)
        if isinstance(made, str):
            pytest.fail(f"bubblewrap must work where the tests run: {made}")
        return made

    def open(self) -> None:
        declared = [Declared(tier="RTX4090", count=4, simulated=True)]
        self.machine = Machine("here", declared, ask=lambda: Probe(problem="no driver"))
        layout = controllers.find(os.environ.get("DURE_CGROUP_ROOT", "")).layout
        confinement = Confinement(
            uid=os.getuid(),
            state_dir=str(self.root.parent),
            **{"controllers": layout, "processes": 200, **self.confinement},
        )
        self.backend = LocalBackend(
            self.root,
            self.machine,
            self.runtime(),
            self.clock,
            durations=self.durations,
            confinement=confinement,
        )
        self.backend.watch(self.hint)
        self.cursor = 0

    # -- jobs --

    def launch(self, *command: str, job: int = 1, **fields: object) -> None:
        wanted = order("job", job, command=command, **{"unix_uid": self.uid, **fields})
        (answer,) = self.backend.launch([wanted])
        assert not answer.reason, answer.reason

    def run(self, *command: str, job: int = 1, **fields: object) -> str:
        """Run to the end; what it has printed."""
        self.launch(*command, job=job, **fields)
        self.until(job, "Freed")
        return self.log(job)

    def log(self, job: int = 1) -> str:
        return Path(self.backend.log_path(LeaseKey(job=job, epoch=1))).read_text()

    def stop(self, kill_after_s: float, job: int = 1) -> None:
        key = LeaseKey(job=job, epoch=1)
        self.backend.stop([StopOrder(key=key, kind=StopKind.CANCEL, kill_after_s=kill_after_s)])

    def exit(self, job: int = 1) -> dict[str, object]:
        return json.loads((self.root / str(job) / "1" / "exit.json").read_text())

    def groups(self) -> list[Path]:
        """Control groups of this rig's jobs that still exist."""
        found = []
        for run in self.root.glob("*/1"):
            layout = json.loads((run / "spec.json").read_text())["cgroup"]
            found += [Path(p) for p in (layout or {"folders": {}})["folders"].values()]
        return [path for path in found if path.exists()]

    def close(self) -> None:
        """As the local rig's; what it kills cannot take its control group away itself."""
        super().close()
        for run in self.root.glob("*/*/spec.json"):
            layout = json.loads(run.read_text())["cgroup"]
            assert layout is None or Group(layout).remove()

    def nothing_left(self) -> None:
        """No process, control group, mount or socket of any job."""
        self.wait(lambda: not self.left())
        assert self.groups() == []
        assert str(self.root) not in Path("/proc/self/mounts").read_text()
        assert not list(self.root.glob("*/1/ctl.sock"))
