"""Where this process's cgroups are: mounts, own path, ancestors; v1, v2 and both at once.

`DURE_CGROUP_ROOT` names another tree: either a copy of the mounted folders alone, or one with
`proc/self/cgroup` and `proc/self/mountinfo` inside, whose mount points then lie below it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

PROC_SELF = Path("/proc/self")
CONTROLLERS = ("memory", "cpu", "cpuacct")
UNIFIED = ""
"""The name under which the one v2 hierarchy stands beside v1's controllers."""


class Mount(NamedTuple):
    """One mounted hierarchy: where it is, and which part of it is visible."""

    point: Path
    root: str = "/"


class Chain(NamedTuple):
    """The folders of one controller: this process's own first, then its ancestors."""

    folders: tuple[Path, ...]
    version: int


def chain(controller: str, environ: Mapping[str, str] | None = None) -> Chain | None:
    """The controller's folders for this process, or None where it is mounted nowhere."""
    env = os.environ if environ is None else environ
    root = env.get("DURE_CGROUP_ROOT")
    proc, prefix = _proc_of(root)
    paths = _own_paths(_text(proc / "cgroup"))
    mounts = (
        _mounts(_text(proc / "mountinfo"), prefix) if prefix or not root else _guess(Path(root))
    )
    for name, version in ((controller, 1), (UNIFIED, 2)):
        mount = mounts.get(name)
        if mount is None:
            continue
        folders = _upwards(mount, paths.get(name, "/"))
        if version == 2 or _has(folders[0], controller):
            return Chain(folders, version)
    return None


def _proc_of(root: str | None) -> tuple[Path, str]:
    """The proc folder to read and what stands before every mount point it names."""
    inside = Path(root or "", "proc", "self")
    return (inside, root) if root and (inside / "mountinfo").is_file() else (PROC_SELF, "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _own_paths(text: str) -> dict[str, str]:
    """`/proc/self/cgroup`: controller → path; v2 has no controller's name."""
    found = {}
    for line in text.splitlines():
        _, names, path = ([*line.split(":", 2), "", ""])[:3]
        for name in names.split(","):
            found[name] = path or "/"
    return found


def _mounts(text: str, prefix: str) -> dict[str, Mount]:
    found: dict[str, Mount] = {}
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in {"cgroup", "cgroup2"}:
            continue
        mount = Mount(Path(prefix + _plain(fields[4])), _plain(fields[3]))
        names = [UNIFIED] if kind[0] == "cgroup2" else kind[-1].split(",")
        for name in names:
            found.setdefault(name, mount)
    return found


def _plain(text: str) -> str:
    """Mountinfo writes a space as backslash 040."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), text)


def _guess(root: Path) -> dict[str, Mount]:
    """The mounts of a tree without mountinfo, told from its folders."""
    found = {UNIFIED: Mount(root)}
    for folder in (root, root / "unified"):
        if (folder / "cgroup.controllers").is_file():
            found[UNIFIED] = Mount(folder)
    for joint in root.iterdir() if root.is_dir() else ():
        for name in joint.name.split(","):
            if name in CONTROLLERS and joint.is_dir():
                found[name] = Mount(joint)
    return found


def _has(folder: Path, controller: str) -> bool:
    """Whether a v1 hierarchy really carries the controller (a hybrid may have an empty folder)."""
    probes = {"memory": "memory.usage_in_bytes", "cpu": "cpu.stat", "cpuacct": "cpuacct.usage"}
    return (folder / probes[controller]).exists()


def _upwards(mount: Mount, path: str) -> tuple[Path, ...]:
    """From the process's own folder up to the mount point."""
    inside = path
    if mount.root != "/":
        # A part of the hierarchy is mounted: what lies above it cannot be seen.
        inside = path[len(mount.root) :] if (path + "/").startswith(mount.root + "/") else "/"
    parts = [p for p in inside.split("/") if p]
    folder = mount.point.joinpath(*parts)
    if ".." in parts or not folder.is_dir():
        return (mount.point,)
    found: list[Path] = [folder]
    while found[-1] != mount.point:
        found.append(found[-1].parent)
    return tuple(found)
