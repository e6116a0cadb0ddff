"""What a jail shows of this machine: found once at start, then only data."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dure
from dure.core.model import Value

TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/fonts",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/ssl/certs",
)
"""Public files that programs and libraries ask for; nothing that names a person or a secret."""
DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
"""Nodes that every CUDA program opens beside its GPU's own."""


class Host(Value, frozen=True, kw_only=True):
    """The parts of this machine that every jail sees, all read-only."""

    links: tuple[tuple[str, str], ...]
    """Top folders that are links: (`/bin`, `usr/bin`)."""
    folders: tuple[str, ...]
    """Folders and files of the system, and the Python that Dure runs on."""
    python: str
    """Interpreter of the first program inside."""
    package: str
    """Folder of the package `dure`."""
    machine: str
    """Processor, as `os.uname` names it."""


def look() -> Host:
    """Look at this machine."""
    tops = [Path("/", name) for name in TOP]
    folders = ["/usr", *(str(p) for p in tops if p.is_dir() and not p.is_symlink())]
    folders += [name for name in ETC if Path(name).exists()]
    # Without these the Python of a virtual environment would not find its library.
    folders += [p for p in dict.fromkeys((sys.base_prefix, sys.prefix)) if not inside(p, "/usr")]
    return Host(
        links=tuple((str(p), str(p.readlink())) for p in tops if p.is_symlink()),
        folders=tuple(folders),
        python=os.path.realpath(sys.executable),
        package=str(Path(dure.__file__).resolve().parent),
        machine=os.uname().machine,
    )


def inside(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies in it; both are absolute and normal."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def gpu_devices(indices: tuple[int, ...], folder: str = "/dev") -> tuple[str, ...]:
    """Device nodes of these GPUs and of the driver, where they exist."""
    names = [f"nvidia{index}" for index in indices] + list(DEVICES)
    return tuple(f"{folder}/{name}" for name in names if Path(folder, name).exists())
