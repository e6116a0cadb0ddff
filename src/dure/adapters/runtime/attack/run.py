"""Run the attacks as a job under one runtime, and without any, so that each is proven to work.

The job goes through the real backend and its supervisor: what is tested is what jobs get.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import dure
from dure.adapters.clock import SystemClock
from dure.adapters.compute.local.backend import LocalBackend
from dure.adapters.compute.local.confinement import Confinement
from dure.adapters.compute.local.gpus import Found, Machine, Probe
from dure.adapters.runtime import host
from dure.adapters.runtime.attack.report import Check, Report
from dure.adapters.runtime.attack.scene import Scene, set_up
from dure.adapters.runtime.choose import apptainer, bubblewrap
from dure.adapters.runtime.jail import PACKAGE, Yard
from dure.core.model import JobId, LabId, NodeId, PlacementId, TierId, UserId
from dure.ports import Exited, Freed, LaunchOrder, LeaseKey, Runtime

KEY = LeaseKey(job=JobId(1), epoch=1)
LIMIT_S = 60.0
OWN = "own: "
"""Attacks that must work: without them the jail would be of no use."""
MODES: dict[str, Callable[[Yard], Runtime | str]] = {
    "bubblewrap": bubblewrap,
    "bubblewrap-root": bubblewrap,
    "apptainer": apptainer,
}
"""`bubblewrap` with a user namespace, made by root for another user, and Apptainer."""


Results = dict[str, tuple[bool, str]]


def attacks_file() -> Path:
    """The program that a job runs; the package is in every jail."""
    return Path(dure.__file__).resolve().parent / "adapters/runtime/attack/attacks.py"


def main(mode: str, *outside: str) -> int:
    """Print the report as one line of JSON; `outside` is host and port of another machine."""
    report = attack(mode, (outside[0], int(outside[1])) if outside else None)
    print(msgspec.json.encode(report).decode())  # noqa: T201 - read by `report`
    return 0


def attack(mode: str, outside: tuple[str, int] | None = None) -> Report:
    """Set the scene, run the controls and then the jail."""
    if mode == "bubblewrap-root" and os.getuid() != 0:
        return Report(mode=mode, skipped="only root can start a job as another user")
    with set_up(outside) as scene:
        yard = Yard(host=host.look(), state_dir=str(scene.state))
        runtime = MODES[mode](yard)
        if isinstance(runtime, str):
            return Report(mode=mode, skipped=runtime)
        uid = 0 if mode == "bubblewrap" else scene.uid
        proven = _controls(scene)
        for name in ("left_tmp", "left_shm"):
            Path(str(scene.targets[name])).unlink(missing_ok=True)
        found = _as_job(scene, runtime, uid)
    checks = tuple(
        Check(
            name=name,
            open=worked,
            allowed=name.startswith(OWN),
            proven=name in proven,
            detail=detail,
        )
        for name, (worked, detail) in found.items()
    )
    return Report(mode=mode, checks=checks)


# -- controls ------------------------------------------------------------------------


def _controls(scene: Scene) -> set[str]:
    """Attacks that work without a jail: as the same user, and some only as root."""
    run_dir = scene.state / "runs" / "7" / "1"
    (run_dir / "out").mkdir(parents=True)
    (run_dir / "spec.json").write_text("{}")
    targets = {
        **scene.targets,
        "control": True,
        "gpu_own": str(scene.devices / "nvidia0"),
        "gpu_other": str(scene.devices / "nvidia1"),
    }
    env = {
        "PATH": os.defpath,
        "JOB_OUTPUT_DIR": str(run_dir / "out"),
        "SECRET": str(scene.targets["secret"]),
    }
    python = sys.executable
    command = [python, "-I", "-S", str(attacks_file()), json.dumps(targets)]
    with _listening(run_dir / "ctl.sock"):
        worked = _control(command, env, {})
        if scene.uid:
            # In mounts of its own, where what it mounts hurts nobody.
            worked |= _control(["unshare", "--mount", *command], env, {})
            worked |= _as_user(scene, targets, env)
    return worked


def _as_user(scene: Scene, targets: dict[str, str | int | bool], env: dict[str, str]) -> set[str]:
    """As the attacker's own user; the programs must lie where that one can read them."""
    here = attacks_file().parent
    copy = scene.base / "dure" / here.relative_to(here.parents[2])
    shutil.copytree(here, copy)
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    user = {"user": scene.uid, "group": scene.uid, "extra_groups": []}
    return _control([python, "-I", "-S", str(copy / "attacks.py"), json.dumps(targets)], env, user)


def _control(command: list[str], env: dict[str, str], user: dict[str, object]) -> set[str]:
    done = subprocess.run(  # noqa: S603 - our own program
        command,
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        **user,  # type: ignore[call-overload]
    )
    return {name for name, (worked, _) in parse(done.stdout).items() if worked}


def _listening(path: Path) -> subprocess.Popen[bytes]:
    """A listener on a socket like a supervisor's."""
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]);"
        " s.listen(9); print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-I", "-S", "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def parse(text: str) -> Results:
    """What the program has printed; nothing if it has not come that far."""
    for line in text.splitlines():
        if line.startswith("ATTACKS "):
            found = json.loads(line.removeprefix("ATTACKS "))
            return {name: (bool(worked), str(detail)) for name, (worked, detail) in found.items()}
    return {}


# -- the jail ------------------------------------------------------------------------


def _as_job(scene: Scene, runtime: Runtime, uid: int) -> Results:
    """Run them as a job, then look for what it has left on the machine."""
    python = host.look().python
    inside = f"{PACKAGE}/{attacks_file().relative_to(Path(host.look().package))}"
    inside = inside if runtime.confines else str(attacks_file())
    command = (python, "-I", "-S", inside, json.dumps(scene.targets))
    log = run_job(scene, runtime, command, uid)
    found = parse(log)
    if not found:
        words = f"the attacks did not run: {log[-500:]}"
        raise RuntimeError(words)
    for name, where in (
        ("files: leave something in the machine's /tmp", "left_tmp"),
        ("files: leave something in the machine's /dev/shm", "left_shm"),
    ):
        left = Path(str(scene.targets[where])).exists()
        found[name] = (left, "on the machine" if left else "gone with the jail")
    return found


def run_job(scene: Scene, runtime: Runtime, command: tuple[str, ...], uid: int) -> str:
    """Run one command through the real backend; its log."""
    gpus = tuple(Found(index=i, name="RTX4090", uuid=f"GPU-{i}", mib=1) for i in (0, 1))
    machine = Machine("here", [], ask=lambda: Probe(gpus=gpus))
    confinement = Confinement(
        uid=os.getuid(),
        state_dir=str(scene.state),
        workdirs=(str(scene.workdir),),
        devices=str(scene.devices),
    )
    backend = LocalBackend(
        scene.state / "runs", machine, runtime, SystemClock(), confinement=confinement
    )
    order = LaunchOrder(
        key=KEY,
        placement=PlacementId(node=NodeId("here"), tier=TierId("RTX4090")),
        gpus=(0,),
        user=UserId("attacker"),
        lab=LabId("LAB"),
        name="attack",
        command=command,
        env={},
        workdir=str(scene.workdir),
        start_no=1,
        unix_uid=uid,
    )
    try:
        (answer,) = backend.launch([order])
        if answer.reason:
            return answer.reason
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            seen, _ = backend.observe(0)
            if any(isinstance(o, Freed) for o in seen):
                break
            time.sleep(0.02)
        text = Path(backend.log_path(KEY) or os.devnull).read_text(errors="replace")
        ends = [o.evidence.stderr_tail for o in seen if isinstance(o, Exited)]
        return text or "".join(ends)
    finally:
        backend.close()
