"""Starting supervisors, fast and detached, and reaping those that have ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from dure.adapters.compute.local.rundir import RunDir

SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
_orphaned: set[int] = set()
"""Supervisors of backends that were closed: still children of this process."""


class Spawner:
    """Children of this process; none of them depends on it."""

    def __init__(self) -> None:
        self._children: set[int] = set()

    def spawn(self, run: RunDir) -> tuple[int, socket.socket]:
        """A supervisor for `run`, and a connection to it that works before it is up."""
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            python = os.path.realpath(sys.executable)
            argv = [python, "-I", "-S", "-X", "utf8", SUPERVISOR, str(run.path)]
            null = str(os.devnull)
            pid = os.posix_spawn(
                python,
                argv,
                {"PATH": os.defpath, "LANG": "C.UTF-8"},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                    (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
                ],
                setsid=True,
                setsigmask=(),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._children.add(pid)
        return pid, ours

    def kill(self, pid: int) -> None:
        """End a supervisor that hangs before it has started anything."""
        if pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        """Collect what has ended."""
        for pids in (self._children, _orphaned):
            for pid in list(pids):
                try:
                    done, _ = os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    done = pid
                if done:
                    pids.discard(pid)

    def close(self) -> None:
        """Leave the children to the next backend of this process."""
        self.reap()
        _orphaned.update(self._children)
        self._children.clear()
