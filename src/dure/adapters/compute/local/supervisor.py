"""Keeper of one job: `python -I -S -X utf8 supervisor.py RUN_DIR`.

Rule: standard library only, syntax of Python 3.9, few imports: it starts once per job.
It outlives the server, and the run directory is its whole contract:

- `spec.json`   what to run (read once)
- `lock`        held (flock) while this process lives; a second supervisor exits at once
- `ctl.sock`    one JSON object a line. In: `{"stop": kind, "kill_after_s": n}`.
                Out: `{"event": "started" | "exited" | "freed"}`; the files hold the facts.
                End of file: this supervisor is gone
- `stop.json`   a stop that was asked before the socket existed: the job is not started
- `status.json` the command's pid and start; written when it has been executed
- `exit.json`   how the command ended; gains `freed` when no process of the job is left
- `log`, `out/` what the job wrote

A standard input that is a socket is the first client, so that whoever spawned this
process neither polls nor waits for `ctl.sock`.
"""
# ruff: noqa: PTH100, PTH108, PTH110, PTH123, SIM105 - as in `keeper`

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import sys
import time

if not __package__:  # run as a script: find `dure` without the site module
    package_root = os.path.abspath(__file__).rsplit(os.sep, 5)[0]
    sys.path.append(package_root)

from dure.adapters.compute.local.keeper import Supervisor
from dure.adapters.compute.local.records import read_json

SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: orphans of the job become children of this process."""


def take_lock() -> bool:
    """Hold `lock` until this process ends. Whoever looks at it holds it for an instant."""
    fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(5):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def first_client() -> socket.socket | None:
    """Standard input, if it is a socket; `/dev/null` takes its place."""
    try:
        sock = socket.socket(fileno=os.dup(0))
    except OSError:
        sock = None
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    return sock


def main(run_dir: str) -> int:
    """Supervise the run in `run_dir`; 0 also for the second of two supervisors."""
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.closerange(3, 65_536)
    os.chdir(run_dir)
    link = first_client()
    umask = os.umask(0o077)
    if not take_lock():
        return 0
    spec = read_json("spec.json")
    if spec is None or os.path.exists("exit.json"):
        return 0
    try:
        os.setsid()
    except OSError:
        pass  # spawned as the leader of a session already
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        os.unlink("ctl.sock")
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("ctl.sock")
    listener.listen(16)
    listener.setblocking(False)
    supervisor = Supervisor(spec, listener, umask)
    if link is not None:
        supervisor.clients.adopt(link)
    supervisor.run()
    try:
        os.unlink("ctl.sock")
    except FileNotFoundError:
        pass  # the job has deleted its run directory
    return 0


def last_words(error: Exception) -> int:
    """Nobody reads this process's stderr: say in the job's log why it is left alone."""
    with open("log", "a", encoding="utf-8") as file:
        file.write(f"dure: the supervisor failed: {error!r}\n")
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - whatever it was, it must be told
        sys.exit(last_words(error))
