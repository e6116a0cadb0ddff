"""What all jails have in common: what is mounted where, who is inside, what starts. Pure."""

from __future__ import annotations

from dure.adapters.runtime import environment, seccomp
from dure.adapters.runtime.host import Host, inside
from dure.adapters.runtime.inside.uncaught import RECORDS
from dure.core.model import Value
from dure.ports import CONTROL_FD, Grant, Inside, LaunchOrder

PACKAGE = "/run/dure/dure"
"""Where a jail finds the package `dure`, whose `jobinit` starts everything."""
HOME = "/home/job"
BASE = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": HOME,
    "USER": "job",
    "LOGNAME": "job",
    "SHELL": "/bin/sh",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",  # noqa: S108 - the jail's own
}
HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"


class Bind(Value, frozen=True, kw_only=True):
    """One folder or file of the machine, seen at `target`."""

    source: str
    target: str
    writable: bool = False
    device: bool = False


class Yard(Value, frozen=True, kw_only=True):
    """What one site puts into its jails."""

    host: Host
    state_dir: str
    """Never seen but for the job's own output folder, even below a folder that is."""
    shared: tuple[str, ...] = ()


def binds(yard: Yard, order: LaunchOrder, grant: Grant) -> list[Bind]:
    """Everything from outside, parents before what lies in them."""
    readable = [*yard.host.folders, *yard.shared, *filter(None, [order.workdir])]
    found = {path: Bind(source=path, target=path) for path in readable}
    found[PACKAGE] = Bind(source=yard.host.package, target=PACKAGE)
    if grant.devices:
        # NCCL reads from here how the cards are connected.
        found["/sys"] = Bind(source="/sys", target="/sys")
    for node in grant.devices:
        found[node] = Bind(source=node, target=f"/dev/{node.rsplit('/', 1)[1]}", device=True)
    out = grant.output_dir
    found[out] = Bind(source=out, target=out, writable=True)
    return sorted(found.values(), key=lambda b: (b.target.count("/"), b.target))


def covers(yard: Yard, order: LaunchOrder) -> bool:
    """Whether something that the job sees contains the server's own folder."""
    seen = (*yard.host.folders, *yard.shared, *filter(None, [order.workdir]))
    return any(inside(yard.state_dir, folder) for folder in seen)


def first_program(yard: Yard, order: LaunchOrder, grant: Grant) -> Inside:
    """What `jobinit` is told."""
    env = environment.of_job(BASE, order, grant, package=PACKAGE, uncaught=RECORDS)
    return Inside(
        argv=order.command,
        env=env,
        cwd=order.workdir or grant.output_dir,
        uid=grant.uid,
        seccomp=seccomp.program(yard.host.machine),
        processes=grant.processes,
    )


def jobinit(python: str) -> tuple[str, ...]:
    """Command line of the first program inside: it shows nothing of the job."""
    script = f"{PACKAGE}/adapters/runtime/inside/jobinit.py"
    return (python, "-I", "-S", "-X", "utf8", script, str(CONTROL_FD))


def launcher_env(order: LaunchOrder, grant: Grant) -> dict[str, str]:
    """Environment outside the jail: the marks by which the server knows its processes."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "JOB_ID": str(order.key.job),
        "DURE_JOB_EPOCH": str(order.key.epoch),
        "JOB_OUTPUT_DIR": grant.output_dir,
    }


def passwd(uid: int) -> bytes:
    """Accounts as the job sees them: its own, root's and nobody's."""
    own = f"job:x:{uid}:{uid}:job:{HOME}:/bin/sh\n" if uid not in (0, 65_534) else ""
    return f"root:x:0:0:root:/:/bin/sh\n{own}nobody:x:65534:65534:nobody:/:/bin/false\n".encode()


def group(uid: int) -> bytes:
    """Groups, likewise."""
    own = f"job:x:{uid}:\n" if uid not in (0, 65_534) else ""
    return f"root:x:0:\n{own}nogroup:x:65534:\n".encode()
