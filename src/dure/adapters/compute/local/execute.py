"""The last steps before a job's command, or the jail around it, is executed.

Rule: standard library only, syntax of Python 3.9, few imports: they cost time in each job.
"""
# ruff: noqa: PTH118, PTH120, S606 - pathlib costs time; no shell is meant

from __future__ import annotations

import base64
import errno
import os
import resource
import signal
import sys

TYPE_CHECKING = False  # typing itself is too slow to import
if TYPE_CHECKING:
    from typing import Any

    from dure.adapters.compute.local.cgroups import Group

    Fields = dict[str, Any]

CONTROL_FD = 3
"""As in `dure.ports`, which this process does not import."""


def execute(spec: Fields, out: int, umask: int, control: int, group: Group | None) -> None:
    """Become `spec`'s command. Never returns: what cannot run exits 127 or 126."""
    number = 126
    what = "?"
    try:
        argv = list(spec["argv"])
        what = cwd = str(spec.get("cwd") or "out")
        os.setsid()
        for each in range(1, 32):
            # Whatever the server was started with (a shell's `&` ignores SIGQUIT).
            if each not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(each, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        hand_over(spec, control)
        if group is not None:
            group.join()
        os.umask(umask)
        os.chdir(cwd)
        what = argv[0]
        limit(spec)
        os.execvpe(what, argv, dict(spec["env"]))
    except OSError as error:
        number = 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
        os.write(2, f"dure: cannot run {what!r}: {error.strerror}\n".encode())
    except BaseException as error:  # noqa: BLE001 - this process must not live on
        os.write(2, f"dure: cannot run {what!r}: {error!r}\n".encode())
    finally:
        os._exit(number)


def hand_over(spec: Fields, control: int) -> None:
    """Put the control connection and the files where the command looks for them."""
    held = {int(fd): base64.b64decode(data) for fd, data in (spec.get("files") or {}).items()}
    if control >= 0:
        os.dup2(control, CONTROL_FD)
        os.set_inheritable(CONTROL_FD, True)
    for fd, data in held.items():
        memory = os.memfd_create("dure", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(data)
        os.lseek(memory, 0, os.SEEK_SET)
        os.dup2(memory, fd)
        if memory != fd:
            os.close(memory)
        os.set_inheritable(fd, True)


def limit(spec: Fields) -> None:
    """Limits that the job cannot raise again."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file_mib = int(spec.get("output_limit_mib") or 0)
    if file_mib:
        # The write fails, as the policy says; the default action would kill the job.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_mib << 20, file_mib << 20))
    data_mib = int(spec.get("data_limit_mib") or 0)
    if data_mib:
        resource.setrlimit(resource.RLIMIT_DATA, (data_mib << 20, data_mib << 20))


def copy_output(source: str, log: int, uid: int) -> int:
    """Fill `out` from an earlier attempt's, in a process that dies with this one."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        program = os.path.join(os.path.dirname(__file__), "outcopy.py")
        python = sys.executable
        os.execv(python, [python, "-I", "-S", "-X", "utf8", program, source, "out", str(uid)])
    finally:
        os._exit(1)
