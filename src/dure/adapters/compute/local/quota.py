"""The size of a job's output folder: at its limit writes fail, and the job goes on.

Rule: standard library only, syntax of Python 3.9: the supervisor imports it. No file system
limits one folder everywhere, so a short-lived child measures it now and then; while it is too
large every process of the job may write no file at all (RLIMIT_FSIZE 0). What a job prints
goes through a pipe and is not concerned. A process that lifts its own limit loses it for good.
"""

from __future__ import annotations

import json
import os
import resource
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

WHILE_FULL_S = 0.5
SHARE = 20
"""Measuring takes at most this part of the time: a million files are looked at rarely."""
FREE_AGAIN = 0.95
DEEPEST = 200


def measure(folder: str) -> int:
    """Bytes on disk below `folder`, links not followed; what cannot be read counts nothing."""
    seen: set[tuple[int, int]] = set()
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(folder, flags)
    except OSError:
        return 0
    return _below(fd, seen, flags, 0)


def _below(fd: int, seen: set[tuple[int, int]], flags: int, depth: int) -> int:
    total = 0
    try:
        with os.scandir(fd) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            try:
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if (info.st_dev, info.st_ino) in seen:
                    continue
                if info.st_nlink > 1:
                    seen.add((info.st_dev, info.st_ino))
                total += info.st_blocks * 512
                if stat.S_ISDIR(info.st_mode) and depth < DEEPEST:
                    total += _below(os.open(name, flags, dir_fd=fd), seen, flags, depth + 1)
            except OSError:
                continue  # gone meanwhile
    finally:
        os.close(fd)
    return total


def allow_writes(pids: Iterable[int], allowed: bool) -> None:
    """Let these processes write files, or not; this process must run as their user."""
    for pid in pids:
        try:
            soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            if allowed:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
            elif soft:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        except (OSError, ValueError):
            continue


def forbid_for_good(pids: Iterable[int]) -> None:
    """Those that may write although they were told not to never may again."""
    for pid in pids:
        try:
            if resource.prlimit(pid, resource.RLIMIT_FSIZE)[0]:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        except (OSError, ValueError):
            continue


class Quota:
    """Measures `out` from time to time. `pid` is the child that does, 0 if none does."""

    def __init__(self, limit_mib: int, uid: int, every_s: float) -> None:
        self.limit = limit_mib << 20
        self.uid = uid
        self.every_s = every_s
        self.pid = 0
        self.over = False
        self.ever = False
        self.due = 0.0
        self._began = 0.0
        self._source = -1

    def begin(self, now: float, pids: set[int]) -> None:
        """Start a measurement if it is time; it also sets the limits of `pids`."""
        if not self.limit or self.pid or now < self.due:
            return
        self._began = now
        self._source, into = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if not self.pid:
            self._child(into, pids)
        os.close(into)

    def _child(self, into: int, pids: set[int]) -> None:
        try:
            os.nice(10)
            used = measure("out")
            over = used >= self.limit * (FREE_AGAIN if self.over else 1)
            if self.uid:
                os.setgroups([])
                os.setresgid(self.uid, self.uid, self.uid)
                os.setresuid(self.uid, self.uid, self.uid)
            if over and self.over:
                forbid_for_good(pids)
            elif over != self.over:
                allow_writes(pids, allowed=not over)
            os.write(into, json.dumps({"over": over}).encode())
        finally:
            os._exit(0)

    def reaped(self, now: float) -> bool:
        """The child has ended; True if the folder has just become full."""
        data = os.read(self._source, 4096)
        os.close(self._source)
        self.pid = 0
        was = self.over
        self.over = bool(data) and bool(json.loads(data)["over"])
        every = min(WHILE_FULL_S, self.every_s) if self.over else self.every_s
        self.due = now + max(every, (now - self._began) * SHARE)
        first = self.over and not was
        self.ever = self.ever or first
        return first
