"""Limits of one job by a control group of its own, for both layouts of the kernel.

Rule: standard library only, syntax of Python 3.9: the supervisor imports it. A layout is a
dict (it travels in `spec.json`): `version` 1 or 2, and `folders`, from controller to the
job's folder; on version 2 the one key is `all`.
"""
# ruff: noqa: PTH103, PTH106, PTH118, PTH123 - pathlib costs time at each start

from __future__ import annotations

import errno
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Layout = dict[str, Any]

PERIOD_US = 100_000
GONE_S = 2.0
"""Time for the kernel to take away the last killed process of a group."""


def write(path: str, text: object) -> None:
    """One value into one of the kernel's files."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(text).encode())
    finally:
        os.close(fd)


def read(path: str) -> str:
    """A kernel file's text, or nothing."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def counter(path: str, name: str) -> int:
    """`name N` in a file of such lines."""
    for line in read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


class Group:
    """One job's group. Nothing is there before `make`, nothing after `remove`."""

    def __init__(self, layout: Layout) -> None:
        self.version = int(layout["version"])
        self.folders: dict[str, str] = dict(layout["folders"])

    def file(self, controller: str, name: str) -> str:
        """Path of a control file."""
        folder = self.folders["all" if self.version == 2 else controller]
        return os.path.join(folder, name)

    def make(self, memory_mib: int, cores: float, processes: int) -> None:
        """Make the folders and set the limits; 0 sets none."""
        for folder in self.folders.values():
            os.makedirs(folder, mode=0o755, exist_ok=True)
        if self.version == 2:
            self._limit_v2(memory_mib, cores, processes)
        else:
            self._limit_v1(memory_mib, cores, processes)

    def _limit_v2(self, memory_mib: int, cores: float, processes: int) -> None:
        if memory_mib:
            write(self.file("all", "memory.max"), memory_mib << 20)
            # Half a distributed job would wait for its dead half for ever.
            write(self.file("all", "memory.oom.group"), 1)
            self._try("memory.swap.max", 0)
        if cores:
            write(self.file("all", "cpu.max"), f"{int(cores * PERIOD_US)} {PERIOD_US}")
        if processes:
            write(self.file("all", "pids.max"), processes)

    def _limit_v1(self, memory_mib: int, cores: float, processes: int) -> None:
        if memory_mib and "memory" in self.folders:
            write(self.file("memory", "memory.limit_in_bytes"), memory_mib << 20)
            self._try("memory.memsw.limit_in_bytes", memory_mib << 20)
        if cores and "cpu" in self.folders:
            write(self.file("cpu", "cpu.cfs_period_us"), PERIOD_US)
            write(self.file("cpu", "cpu.cfs_quota_us"), int(cores * PERIOD_US))
        if processes and "pids" in self.folders:
            write(self.file("pids", "pids.max"), processes)

    def _try(self, name: str, value: object) -> None:
        """A file that not every kernel has (no swap accounting)."""
        try:
            write(self.file("memory", name), value)
        except OSError:
            return

    def join(self) -> None:
        """Put this process in; all that it starts stays in."""
        for folder in self.folders.values():
            write(os.path.join(folder, "cgroup.procs"), 0)

    def members(self) -> set[int]:
        """Processes inside, as this process's PID namespace numbers them."""
        found: set[int] = set()
        for folder in self.folders.values():
            found.update(int(x) for x in read(os.path.join(folder, "cgroup.procs")).split())
        return found - {0}

    def oom_kills(self) -> int:
        """Processes that the kernel killed here because the memory limit was reached."""
        if self.version == 2:
            return counter(self.file("all", "memory.events"), "oom_kill")
        if "memory" not in self.folders:
            return 0
        return counter(self.file("memory", "memory.oom_control"), "oom_kill")

    def peak_mib(self) -> int:
        """Most memory that was ever used; 0 where the kernel does not tell."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        if self.version == 1 and "memory" not in self.folders:
            return 0
        text = read(self.file("memory", name)).strip()
        return int(text) >> 20 if text.isdigit() else 0

    def pids_refused(self) -> int:
        """How often a fork was refused at the limit."""
        if self.version == 1 and "pids" not in self.folders:
            return 0
        return counter(self.file("pids", "pids.events"), "max")

    def kill(self) -> None:
        """SIGKILL to everything inside; on version 2 in one step of the kernel."""
        if self.version == 2:
            try:
                write(self.file("all", "cgroup.kill"), 1)
            except OSError:
                pass  # before Linux 5.14
            else:
                return
        for pid in self.members() - {os.getpid()}:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue

    def remove(self) -> bool:
        """Kill what is left and take the folders away; False if something would not go."""
        end = time.monotonic() + GONE_S
        while True:
            if self.members():
                self.kill()
            if self._rmdir():
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.005)

    def _rmdir(self) -> bool:
        for folder in set(self.folders.values()):
            try:
                os.rmdir(folder)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    return False
        return True
