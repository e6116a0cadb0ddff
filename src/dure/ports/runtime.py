"""How a job is confined: a pure function from an order to what is started."""

from __future__ import annotations

from typing import Protocol

from dure.core.model import (
    Value,
)
from dure.ports.compute import LaunchOrder


class Grant(Value, frozen=True, kw_only=True):
    """What one attempt may use on its node."""

    run_dir: str
    output_dir: str
    gpu_uuids: tuple[str, ...]
    cores: int
    memory_mib: int
    data_limit_mib: int = 0
    """Limit on the process's own memory (RLIMIT_DATA); 0: none."""
    devices: tuple[str, ...] = ()
    """Device nodes of the granted GPUs, with those that every GPU needs."""
    uid: int = 0
    """Unix user and group that the job becomes; 0: it stays the server's own user."""
    processes: int = 0
    """Most processes and threads, where no cgroup limits them; 0: a cgroup does."""


class Inside(Value, frozen=True, kw_only=True):
    """What the first program inside a jail is told: it starts the job's command."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    uid: int = 0
    seccomp: bytes = b""
    """Classic BPF program over system calls; empty: none."""
    processes: int = 0


class RuntimeCommand(Value, frozen=True, kw_only=True):
    """What the supervisor executes."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str = ""
    """Where it is executed; empty: in the job's own folder."""
    files: dict[int, bytes] = {}
    """Open files that it finds, by descriptor: nothing of them shows in `ps`."""
    inside: Inside | None = None
    """Told over descriptor `CONTROL_FD`; None: `argv` is the job's own command."""


CONTROL_FD = 3
"""Where a jail's first program finds its connection to the supervisor."""


class Runtime(Protocol):
    """How a job's process is confined: a pure function of order and grant."""

    name: str
    confines: bool
    """Whether it keeps other people's things out of a job's sight."""

    def command(self, order: LaunchOrder, grant: Grant) -> RuntimeCommand: ...
