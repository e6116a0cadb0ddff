"""All runs of the attacks on this machine, and what they have found."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from dure.core.model import Value

MODES = ("bubblewrap", "bubblewrap-root", "apptainer")
"""With a user namespace; made by root for a job that becomes another user; Apptainer."""
LIMIT_S = 120.0
OUTSIDE, INSIDE = "192.0.2.1", "192.0.2.2"
"""Addresses that are kept for documentation: no real network has them."""
GREETER = (
    "import socket, sys\n"
    "s = socket.create_server((sys.argv[1], 0)); print(s.getsockname()[1], flush=True)\n"
    "while True:\n"
    "    c = s.accept()[0]; c.sendall(b'hello'); c.close()\n"
)


class Check(Value, frozen=True, kw_only=True):
    """One attack: whether it worked in the jail, and whether it does work without one."""

    name: str
    open: bool
    allowed: bool
    """Whether it must work: a job's own output and its own GPU."""
    proven: bool
    """Whether it worked in a control run, as the same user or as root, without a jail."""
    detail: str


class Report(Value, frozen=True, kw_only=True):
    """One run; `skipped` says why there was none."""

    mode: str
    skipped: str = ""
    checks: tuple[Check, ...] = ()


class Summary(Value, frozen=True, kw_only=True):
    """What `dure doctor --attack` tells."""

    checks: int
    open_beyond_allowed: int
    """Open though it must be shut, or shut though it must be open."""
    unproven: int
    """Shut, but not shown to work on this machine without a jail either."""
    runs: tuple[Report, ...]


def beyond(report: Report) -> list[Check]:
    """Checks of a run that did not end as they must."""
    return [check for check in report.checks if check.open != check.allowed]


def run_all(modes: tuple[str, ...] = MODES) -> Summary:
    """Run the attacks under every mode that this machine has."""
    with other_machine() as around:
        runs = tuple(_run(mode, around) for mode in modes)
    return Summary(
        checks=sum(len(run.checks) for run in runs),
        open_beyond_allowed=sum(len(beyond(run)) for run in runs),
        unproven=sum(not check.proven for run in runs for check in run.checks),
        runs=runs,
    )


class Around(Value, frozen=True, kw_only=True):
    """Words before and after the command of a run."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def _run(mode: str, around: Around) -> Report:
    """One run in a process of its own, so that it cannot disturb this one."""
    command = [*around.before, sys.executable, "-m", "dure.adapters.runtime.attack", mode]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            [*command, *around.after], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _broken(mode, f"it did not end in {LIMIT_S:.0f} s")
    if done.returncode:
        return _broken(mode, done.stderr.strip()[-400:])
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Report)


def _broken(mode: str, why: str) -> Report:
    """A run that failed proves nothing, and must not look like one that found nothing."""
    failed = Check(name="the attacks can be run", open=False, allowed=True, proven=True, detail=why)
    return Report(mode=mode, checks=(failed,))


@contextlib.contextmanager
def other_machine() -> Iterator[Around]:
    """Another machine on a cable of its own: two network namespaces. Needs root and `ip`."""
    ip = shutil.which("ip")
    if os.getuid() != 0 or ip is None:
        yield Around()
        return
    here, there = (f"dure-{kind}-{os.getpid()}" for kind in ("here", "there"))
    cable = f"dure{os.getpid()}"  # 15 letters at most
    lines = [
        ("netns", "add", here),
        ("netns", "add", there),
        ("-n", here, "link", "set", "lo", "up"),
        ("link", "add", cable, "netns", here, "type", "veth", "peer", "eth0", "netns", there),
        ("-n", here, "addr", "add", f"{INSIDE}/24", "dev", cable),
        ("-n", there, "addr", "add", f"{OUTSIDE}/24", "dev", "eth0"),
        ("-n", here, "link", "set", cable, "up"),
        ("-n", there, "link", "set", "eth0", "up"),
    ]
    with contextlib.ExitStack() as stack:
        for line in lines:
            done = subprocess.run([ip, *line], capture_output=True, check=False)  # noqa: S603 - looked up
            if line[:2] == ("netns", "add"):
                undo = [ip, "netns", "del", line[2]]
                stack.callback(subprocess.run, undo, check=False, capture_output=True)
            if done.returncode:
                yield Around()  # no network namespaces here: this machine's address stands in
                return
        port = stack.enter_context(_greeter(ip, there))
        yield Around(before=(ip, "netns", "exec", here), after=(OUTSIDE, port))


@contextlib.contextmanager
def _greeter(ip: str, namespace: str) -> Iterator[str]:
    """A service on the other machine; its port."""
    command = [ip, "netns", "exec", namespace, sys.executable, "-I", "-S", "-c", GREETER, OUTSIDE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - ours
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()
