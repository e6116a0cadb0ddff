"""Which runtime this machine uses: what the settings say, else the best one that works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable

from dure.adapters.runtime.apptainer import ApptainerRuntime, make_root
from dure.adapters.runtime.bubblewrap import BubblewrapRuntime
from dure.adapters.runtime.jail import Yard
from dure.adapters.runtime.process import ProcessRuntime
from dure.core.errors import DureError, ErrorCode
from dure.core.model import Value
from dure.ports import Runtime

OLDEST_BUBBLEWRAP = (0, 5)
TRY_S = 20.0


class Choice(Value, frozen=True, kw_only=True):
    """A runtime, and what was found out while choosing it."""

    runtime: Runtime
    passed: tuple[str, ...] = ()
    """Why better ones were passed over, a sentence each."""


def choose(wanted: str, yard: Yard) -> Choice:
    """The runtime that a setting names; `auto` takes the first of three that works.

    Raises BAD_SETTING if the one that is named does not work here: a site that asks for a
    jail must not run jobs without one.
    """
    if wanted == "process":
        return Choice(runtime=ProcessRuntime())
    makers: dict[str, Callable[[Yard], Runtime | str]] = {
        "bubblewrap": bubblewrap,
        "apptainer": apptainer,
    }
    if wanted in makers:
        made = makers[wanted](yard)
        if isinstance(made, str):
            raise DureError(ErrorCode.BAD_SETTING, key="node.runtime", value=f"{wanted}: {made}")
        return Choice(runtime=made)
    passed: list[str] = []
    for name, make in makers.items():
        made = make(yard)
        if not isinstance(made, str):
            return Choice(runtime=made, passed=tuple(passed))
        passed.append(f"{name}: {made}")
    return Choice(runtime=ProcessRuntime(), passed=tuple(passed))


def bubblewrap(yard: Yard) -> Runtime | str:
    """Bubblewrap if it is there, new enough and allowed to make a jail; else why not."""
    program = shutil.which("bwrap")
    if program is None:
        return "bwrap is not installed"
    version = _version([program, "--version"])
    if version < OLDEST_BUBBLEWRAP:
        return f"{program} is older than 0.5"
    namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-user"]
    mounts = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    failed = _fails([program, *namespaces, *mounts, "--cap-drop", "ALL", "/bin/true"])
    if failed:
        return f"no jail can be made: {failed}"
    return BubblewrapRuntime(yard, program=program, version=version, uid=os.getuid())


def apptainer(yard: Yard) -> Runtime | str:
    """Apptainer if it is there and starts something; else why not."""
    program = shutil.which("apptainer") or shutil.which("singularity")
    if program is None:
        return "apptainer is not installed"
    if not _version([program, "--version"]):
        return f"{program} does not tell its version"
    root = make_root(yard)
    runtime = ApptainerRuntime(yard, program=program, root=root, uid=os.getuid())
    if os.getuid() == 0:
        return runtime  # never run as root: each job's launch shows whether it works
    failed = _fails([program, "-q", "exec", "--containall", "--bind", "/usr", root, "/bin/true"])
    return f"no container can be started: {failed}" if failed else runtime


def _version(command: list[str]) -> tuple[int, ...]:
    try:
        done = subprocess.run(  # noqa: S603 - a program that was looked up
            command, capture_output=True, text=True, timeout=TRY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else ()


def _fails(command: list[str]) -> str:
    """Last line of its complaint if it fails; empty if it works."""
    try:
        done = subprocess.run(  # noqa: S603 - as above
            command, capture_output=True, text=True, timeout=TRY_S, check=False, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
    return lines[-1] if done.returncode else ""
