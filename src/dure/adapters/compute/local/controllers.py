"""Where this server may make control groups: found once at start, for both layouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dure.adapters.compute.local.rundir import Layout
from dure.core.model import Value

WANTED = ("memory", "pids", "cpu")
OWN = "dure"
"""Folder of all groups of Dure where the server has none of its own."""
LEAF = "server"
"""Where the server moves itself: on version 2 a group with children holds no process."""


class Found(Value, frozen=True, kw_only=True):
    """Where groups may be made, or why they may not."""

    layout: Layout | None = None
    problem: str = ""


def find(root: str = "", *, mounts: str = "/proc/self/mounts", own: str = "/proc/self") -> Found:
    """Look at what is mounted; `root` (DURE_CGROUP_ROOT) names a folder instead."""
    try:
        if root:
            return _v2(Path(root), move=False)
        mounted = dict(_mounted(Path(mounts).read_text()))
        if "memory" in mounted:
            return _v1({c: mounted[c] for c in WANTED if c in mounted})
        if "unified" in mounted:
            return _v2_own(mounted["unified"], Path(own, "cgroup").read_text())
    except OSError as error:
        return Found(problem=f"{error.filename or 'cgroup'}: {error.strerror}")
    return Found(problem="no control groups are mounted")


def _mounted(mounts: str) -> Iterator[tuple[str, Path]]:
    """Controller and where it is mounted; `unified` is version 2."""
    for line in mounts.splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            yield "unified", Path(where)
        elif kind == "cgroup":
            for controller in WANTED:
                if controller in options.split(","):
                    yield controller, Path(where)


def _v1(mounted: dict[str, Path]) -> Found:
    folders = {}
    for controller, where in mounted.items():
        folder = where / OWN
        folder.mkdir(exist_ok=True)
        _must_write(folder)
        folders[controller] = str(folder)
    return Found(layout=Layout(version=1, folders=folders))


def _v2_own(mount: Path, membership: str) -> Found:
    """The server's own group if it was delegated, a new one below the root else."""
    own = next(line[3:] for line in membership.splitlines() if line.startswith("0::"))
    if own == "/":
        _enable(mount)
        (mount / OWN).mkdir(exist_ok=True)
        return _v2(mount / OWN, move=False)
    return _v2(mount / own.lstrip("/"), move=True)


def _v2(folder: Path, *, move: bool) -> Found:
    has = (folder / "cgroup.controllers").read_text().split()
    missing = [c for c in WANTED if c not in has]
    if "memory" in missing:
        return Found(problem=f"{folder} has not been given the controllers {', '.join(missing)}")
    _must_write(folder)
    if move:
        (folder / LEAF).mkdir(exist_ok=True)
        (folder / LEAF / "cgroup.procs").write_text("0")
    _enable(folder)
    return Found(layout=Layout(version=2, folders={"all": str(folder)}))


def _enable(folder: Path) -> None:
    has = (folder / "cgroup.controllers").read_text().split()
    words = " ".join(f"+{c}" for c in WANTED if c in has)
    (folder / "cgroup.subtree_control").write_text(words)


def _must_write(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise PermissionError(13, "cannot be written", str(folder))
