"""The list of attacks, and what they have in common.

Rule: standard library only, syntax of Python 3.9: it runs inside the jail. An attack returns
something true if it has worked and raises or returns nothing if it was refused. None does
harm where it works: files of the system are opened and not written, signals are number 0.
"""
# ruff: noqa: PTH118, PTH123, PTH108 - few imports

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Attack = Callable[[dict[str, Any]], object]

ATTACKS: dict[str, Attack] = {}
RDONLY, WRONLY = os.O_RDONLY, os.O_WRONLY | os.O_NONBLOCK
libc = ctypes.CDLL(None, use_errno=True)


def attack(name: str) -> Callable[[Attack], Attack]:
    """Add a function to the list."""

    def add(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return add


def ok(result: int) -> bool:
    """Raise an OSError for a system call that was refused."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return True


def closes(fd: int) -> bool:
    """Whether a system call gave a file; close it."""
    ok(fd)
    os.close(fd)
    return True


def opens(path: str, flags: int = RDONLY) -> bool:
    """Open and close."""
    os.close(os.open(path, flags | os.O_CLOEXEC))
    return True


def makes(folder: str) -> bool:
    """Make a file there and take it away again."""
    path = os.path.join(folder, "dure-attack")
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    os.unlink(path)
    return True


def text(path: str) -> str:
    """Read a whole file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
