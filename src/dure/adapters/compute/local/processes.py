"""The machine's processes, read from /proc: who descends from whom, who belongs to a job.

Rule: standard library only and syntax of Python 3.9, for the supervisor imports it.
"""
# ruff: noqa: PTH123, PTH208, SIM105 - pathlib and contextlib cost time at each start

from __future__ import annotations

import os

Tree = dict[int, tuple[int, int]]
"""Parent and process group by process id."""


def processes() -> Tree:
    """Parent and process group of every living process; kernel threads left out."""
    found: Tree = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                data = file.read()
        except OSError:
            continue
        fields = data[data.rindex(b")") + 2 :].split()
        # A zombie is gone, unless threads of it go on after their leader has ended.
        if fields[0] in b"ZX" and int(fields[17]) <= 1:
            continue
        if int(name) != 2 and fields[1] != b"2":
            found[int(name)] = (int(fields[1]), int(fields[2]))
    return found


def descendants(tree: Tree, root: int) -> set[int]:
    """Processes of `tree` below `root`."""
    inside = {root}
    for start in tree:
        path = []
        pid = start
        while pid in tree and pid not in inside:
            path.append(pid)
            pid = tree[pid][0]
            if len(path) > len(tree):
                break
        if pid in inside:
            inside.update(path)
    return inside - {root}


def marked(tree: Tree, marks: list[str]) -> set[int]:
    """Processes of `tree` whose environment at their start held every one of `marks`."""
    if not marks:
        return set()
    wanted = {mark.encode("utf-8", "surrogateescape") for mark in marks}
    found = set()
    for pid in tree:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                data = file.read()
        except OSError:
            continue
        if wanted.issubset(data.split(b"\0")):
            found.add(pid)
    return found - {os.getpid()}


def send_signal(pid: int, number: int, group: bool = False) -> None:
    """Signal a process or group that may be gone already."""
    try:
        (os.killpg if group else os.kill)(pid, number)
    except OSError:
        pass


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for this signal."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:
        pass
    return False
