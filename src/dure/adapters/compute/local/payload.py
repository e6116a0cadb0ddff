"""The processes of one job: started, signalled, killed, and heard of when a jail is around.

Rule: standard library only, syntax of Python 3.9, few imports: they cost time in each job.
"""
# ruff: noqa: PTH103 - pathlib costs time at each start

from __future__ import annotations

import json
import os
import signal
import socket

from dure.adapters.compute.local.cgroups import Group
from dure.adapters.compute.local.execute import execute
from dure.adapters.compute.local.processes import (
    Tree,
    catches,
    descendants,
    marked,
    processes,
    send_signal,
)

TYPE_CHECKING = False  # typing itself is too slow to import
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

EVENT_LIMIT = 1 << 18
UNCAUGHT = "uncaught"
"""Folder of exception records of a job that has no /tmp of its own."""


class Payload:
    """A job's command, or the jail around it. `helpers` are children that are no part of it."""

    def __init__(self, spec: Fields, umask: int) -> None:
        self.spec = spec
        self.umask = umask
        self.command = 0
        self.helpers: set[int] = set()
        self.link: socket.socket | None = None
        self._buffer = b""
        layout = spec.get("cgroup")
        self.group = Group(layout) if layout else None

    @property
    def jailed(self) -> bool:
        """Whether a first program of ours tells what happens inside."""
        return self.spec.get("inside") is not None

    @property
    def uid(self) -> int:
        """The user that the job becomes; 0: this process's own."""
        return int((self.spec.get("inside") or {}).get("uid") or 0)

    def start(self, out: int) -> None:
        """Execute it with `out` as its output. A plain command is executed on return."""
        os.makedirs("out", mode=0o700, exist_ok=True)
        if self.uid:
            os.chown("out", self.uid, self.uid, follow_symlinks=False)
        if self.group is not None:
            wanted = self.spec.get("limits") or {}
            self.group.make(
                int(wanted.get("memory_mib") or 0),
                float(wanted.get("cores") or 0),
                int(wanted.get("processes") or 0),
            )
        if self.jailed:
            self._start_jail(out)
        else:
            self._start_plain(out)

    def _start_plain(self, out: int) -> None:
        os.makedirs(UNCAUGHT, mode=0o700, exist_ok=True)
        done, into = os.pipe2(os.O_CLOEXEC)
        self.command = os.fork()
        if not self.command:
            execute(self.spec, out, self.umask, -1, self.group)
        os.close(into)
        os.read(done, 1)  # ends when the command is executed: it has its own session now
        os.close(done)

    def _start_jail(self, out: int) -> None:
        ours, theirs = socket.socketpair()
        self.command = os.fork()
        if not self.command:
            execute(self.spec, out, self.umask, theirs.fileno(), self.group)
        theirs.close()
        ours.sendall(json.dumps(self.spec["inside"]).encode() + b"\n")
        ours.setblocking(False)
        self.link = ours

    def events(self) -> list[Fields]:
        """What the jail's first program has told; at the end of its connection, what it had."""
        found = []
        while self.link is not None:
            try:
                data = self.link.recv(65_536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data or len(self._buffer) > EVENT_LIMIT:
                self.link.close()
                self.link = None
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
                event["event"]
            except (ValueError, TypeError, KeyError):
                continue  # the job may have taken the connection over
            found.append(event)
        return found

    # -- signals --

    def others(self, tree: Tree) -> set[int]:
        """Its processes that may be no descendants of this one: by their marks, by the group."""
        inside = self.group.members() if self.group is not None else set()
        return (marked(tree, self.spec.get("marks") or []) | inside) - {os.getpid()}

    def everyone(self, tree: Tree) -> set[int]:
        """All of its processes."""
        return (descendants(tree, os.getpid()) | self.others(tree)) - self.helpers

    def ask(self, number: int, catching: bool = False) -> bool:
        """Let the first program inside send a signal; False if there is none to ask."""
        if self.link is None:
            return False
        order = json.dumps({"signal": number, "catching": catching}).encode() + b"\n"
        try:
            self.link.send(order)
        except OSError:
            return False
        return True

    def terminate(self) -> None:
        """SIGTERM to every process, once."""
        if not self.ask(signal.SIGTERM):
            self.signal_all(signal.SIGTERM)

    def signal_all(self, number: int) -> set[int]:
        """Signal whole groups: the kernel does that atomically, a fork cannot slip out."""
        tree = processes()
        me = os.getpid()
        mine = descendants(tree, me) - self.helpers
        groups = {tree[pid][1] for pid in mine} - {os.getpgid(me), 0}
        for group in groups:
            send_signal(group, number, group=True)
        others = self.others(tree) - mine
        for pid in others:
            send_signal(pid, number)
        return mine | others

    def warn(self, name: str) -> None:
        """Send a signal that was asked for, to processes that catch it: it kills others."""
        number = getattr(signal, name, None)
        if number is None or self.ask(number, catching=True):
            return
        for pid in self.everyone(processes()):
            if catches(pid, number):
                send_signal(pid, number)

    def kill(self) -> set[int]:
        """SIGKILL to everything; who was there."""
        if self.group is not None:
            self.group.kill()
        return self.signal_all(signal.SIGKILL)

    def close(self) -> str:
        """Leave nothing behind; a sentence if something would not go."""
        if self.group is not None and not self.group.remove():
            return "the control group could not be removed"
        return ""
