"""Small files of a run directory: written whole, read whole, stamped with two clocks.

Rule: standard library only, syntax of Python 3.9, few imports: they cost time in each job.
"""
# ruff: noqa: PTH103, PTH104, PTH108, PTH110, PTH123 - pathlib costs time at each start

from __future__ import annotations

import fcntl
import json
import os
import time

TYPE_CHECKING = False  # typing itself is too slow to import
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

TAIL_BYTES = 16_384


def stamp() -> dict[str, int]:
    """Now, by the wall and by the clock that nobody can set."""
    boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return {"wall_ms": time.time_ns() // 1_000_000, "boot_ms": boot // 1_000_000}


def boot_id() -> str:
    """Name of this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def tail(path: str, size: int = TAIL_BYTES) -> str:
    """The last `size` bytes of a file as text."""
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            return file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""


def put(name: str, value: Fields, sync: bool) -> None:
    """Replace a file whole; with `sync` it also survives a power cut."""
    fd = os.open(f"{name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(value).encode())
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.rename(f"{name}.tmp", name)
    except OSError:
        os.unlink(f"{name}.tmp")
        raise


def restore(home: str, spec: Fields) -> bool:
    """Make a run directory anew that is gone, with this process's lock on it."""
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
        os.chdir(home)
        if not os.path.exists("lock"):
            lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the end
            put("spec.json", spec, sync=False)
    except OSError:
        return False
    return True


def read_json(name: str) -> Fields | None:
    """A file of the run directory, if it is there and whole."""
    try:
        with open(name, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class Files:
    """Files to be written into the run directory, kept until they are on disk."""

    def __init__(self, home: str) -> None:
        self._home = home
        self.unsaved: dict[str, Fields] = {}
        self._saved: dict[str, Fields] = {}

    def save(self, spec: Fields) -> bool:
        """Write what is not on disk yet; False: try again, as on a full disk."""
        try:
            for name in list(self.unsaved):
                put(name, self.unsaved[name], sync=name == "exit.json")
                self._saved[name] = self.unsaved.pop(name)
        except FileNotFoundError:
            # The job has deleted its own run directory: its end must be told all the same.
            if restore(self._home, spec):
                self.unsaved = {**self._saved, **self.unsaved}
            return False
        except OSError:
            return False
        return True
