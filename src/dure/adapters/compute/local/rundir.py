"""A run directory as the backend sees it: typed files, the lock, the control socket.

`keeper` writes `status.json` and `exit.json`, this module reads them; it writes `spec.json`,
`stop.json` and the `fenced` marker. All replace whole files, so no reader sees half of one.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import TypeVar

import msgspec

from dure.core.model import Evidence
from dure.ports import Inside

T = TypeVar("T")


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """A moment by the wall clock and by CLOCK_BOOTTIME, which nobody can set."""

    wall_ms: int
    boot_ms: int


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Folders of the job's control group, from controller to path (see `cgroups`)."""

    version: int
    folders: dict[str, str]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the control group allows; 0: no limit."""

    memory_mib: int = 0
    cores: float = 0
    processes: int = 0


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """`spec.json`: all that the supervisor needs; durations in seconds."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    marks: tuple[str, ...]
    """Environment entries by which a process is known to belong to this run."""
    gpus: tuple[int, ...] = ()
    boot_id: str = ""
    time_limit_s: float | None = None
    pre_stop_signal: str = ""
    pre_stop_before_s: float = 0
    kill_after_s: float = 30
    leftover_kill_s: float = 30
    data_limit_mib: int = 0
    output_limit_mib: int = 0
    log_limit_mib: int = 0
    quota_every_s: float = 0
    copy_from: str = ""
    files: dict[int, bytes] = {}
    inside: Inside | None = None
    cgroup: Layout | None = None
    limits: Limits | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`status.json`: the command has been executed."""

    pid: int
    started: Stamp
    boot_id: str


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """`exit.json`: the command has ended; with `freed` no process of it is left."""

    exit_code: int | None
    ended: Stamp
    boot_id: str
    signal: int | None = None
    timed_out: bool = False
    vram_limited: bool = False
    stderr_tail: str = ""
    exception: str = ""
    oom_kill: int = 0
    peak_mib: int = 0
    term: Stamp | None = None
    """When SIGTERM was sent, if it was."""
    killed: Stamp | None = None
    """When SIGKILL was first sent, if it was."""
    full: tuple[str, ...] = ()
    freed: Stamp | None = None

    def evidence(self) -> Evidence:
        """What the verdict is drawn from."""
        return Evidence(
            exit_code=self.exit_code,
            signal=self.signal,
            stderr_tail=self.stderr_tail,
            timed_out=self.timed_out,
            vram_limited=self.vram_limited,
            exception=self.exception,
            oom_kill=self.oom_kill,
            term_ms=self.term.wall_ms if self.term else 0,
            kill_ms=self.killed.wall_ms if self.killed else 0,
            full=self.full,
        )


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """`stop.json`, and the line that goes over `ctl.sock`."""

    stop: str
    kill_after_s: float


class RunDir:
    """One attempt's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self.out = path / "out"

    def create(self) -> None:
        """Make it, closed to everybody else."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, name: str, value: msgspec.Struct) -> None:
        """Replace one of the files whole."""
        part = self.path / f"{name}.new"
        part.write_bytes(msgspec.json.encode(value))
        part.chmod(0o600)
        part.rename(self.path / name)

    def _read(self, name: str, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError):
            return None

    def spec(self) -> Spec | None:
        """What is to run here; None: nothing was launched."""
        return self._read("spec.json", Spec)

    def status(self) -> Status | None:
        """The start of the command, once it has started."""
        return self._read("status.json", Status)

    def exit(self) -> Exit | None:
        """The end of the command, once it has ended."""
        return self._read("exit.json", Exit)

    def stop(self) -> Stop | None:
        """The stop that was asked, if one was."""
        return self._read("stop.json", Stop)

    @property
    def fenced(self) -> bool:
        """Whether this attempt must never start or report again."""
        return (self.path / "fenced").exists()

    def fence(self) -> None:
        """Mark it so, durably."""
        self.create()
        (self.path / "fenced").touch(mode=0o600)

    @property
    def untouched(self) -> bool:
        """Whether no supervisor has come here yet."""
        return not (self.path / "lock").exists()

    def is_alive(self) -> bool:
        """Whether a supervisor holds the lock. Trying it holds it for an instant."""
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def connect(self) -> socket.socket | None:
        """A connection to the supervisor; None: nobody listens (yet).

        A socket's path holds 107 bytes at most: the folder is reached through its handle.
        """
        try:
            folder = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(f"/proc/self/fd/{folder}/ctl.sock")
        except OSError:
            sock.close()
            return None
        finally:
            os.close(folder)
        return sock
