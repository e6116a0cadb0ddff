"""What Apptainer cannot do for itself: `python -I -S doorway.py FD`, FD holding its orders.

Rule: standard library only, syntax of Python 3.9. In a mount namespace of its own it lays out
everything the job may see below one folder, also what only root can reach, becomes the job's
user for good, and executes Apptainer with that as its only sources. Its /tmp is as large as
the job's share of memory, where Apptainer's own holds 64 MiB.
"""
# ruff: noqa: B905, PTH101, PTH102, PTH103, PTH110, PTH112, PTH118, PTH119, PTH123, PTH211, S606 - pathlib costs time at each start

from __future__ import annotations

import ctypes
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Orders = dict[str, Any]

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000
BIND, RECURSIVE, PRIVATE, NO_SUID, NO_DEV = 4096, 16384, 1 << 18, 2, 4
NO_NEW_PRIVS = 38
STAGES = ("/mnt", "/media", "/srv", "/opt")
"""Folders of which one exists everywhere; it is covered in this namespace only."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "fuse", "pts", "shm")
LINKS = (
    ("ptmx", "pts/ptmx"),
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
)
OWN = {"tmp": "/tmp", "shm": "/dev/shm", "home": "/home/job"}  # noqa: S108 - the jail's own

_libc = ctypes.CDLL(None, use_errno=True)


def call(result: int, what: str) -> None:
    """Raise an OSError for a system call that failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount, or raise an OSError that names the target."""
    encoded = [os.fsencode(text) for text in (source, target, kind)]
    call(_libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None), target)


def own_namespace(uid: int) -> None:
    """Mounts made from here on are nobody else's; without root a user namespace allows them."""
    gid = os.getgid()
    unprivileged = os.getuid() != 0
    call(_libc.unshare(NEW_MOUNTS | (NEW_USER if unprivileged else 0)), "unshare")
    if unprivileged:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        with open("/proc/self/gid_map", "w", encoding="ascii") as file:
            file.write(f"{gid} {gid} 1")
    mount("none", "/", "none", RECURSIVE | PRIVATE)


class Stage:
    """One folder with all sources in it, and Apptainer's options that name them."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.path = next(folder for folder in STAGES if os.path.isdir(folder))
        self.options: list[str] = []
        self.count = 0
        # Opened before the stage covers a folder in which some of them may lie.
        self.root = os.open(orders["root"], os.O_PATH | os.O_CLOEXEC)
        self.sources = [os.open(b["source"], os.O_PATH | os.O_CLOEXEC) for b in orders["binds"]]

    def build(self) -> str:
        """Mount everything; the root file system's path."""
        size = f"size={self.orders['size_mib']}m,mode=0755"
        mount("tmpfs", self.path, "tmpfs", NO_SUID | NO_DEV, size)
        for name, target in OWN.items():
            folder = self._path(name)
            os.mkdir(folder)
            os.chmod(folder, 0o1777)  # noqa: S103 - every process of the job may write here
            self._show(folder, target, writable=True)
        for target, fd in self.orders["files"].items():
            self._file(target, fd)
        root = self._place(self.root)
        self._devices()
        for bind, source in zip(self.orders["binds"], self.sources):
            if bind["device"]:
                continue
            if self.orders["cover"] and bind["writable"]:
                self._cover(bind["target"])
            self._show(self._place(source), bind["target"], bind["writable"])
        return root

    def _path(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _place(self, source: int) -> str:
        """Bind an open file or folder to a fresh name on the stage."""
        self.count += 1
        path = self._path(f"bind{self.count}")
        if os.path.isdir(f"/proc/self/fd/{source}"):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        mount(f"/proc/self/fd/{source}", path, "none", BIND | RECURSIVE)
        return path

    def _devices(self) -> None:
        """A /dev with nothing but the granted cards: Apptainer passes on only what lies there."""
        granted = [b["device"] for b in self.orders["binds"]]
        if not any(granted):
            return
        folder = self._path("dev")
        os.mkdir(folder)
        nodes = [(f"/dev/{name}", f"/dev/{name}") for name in DEVICES]
        for bind, source in zip(self.orders["binds"], self.sources):
            if bind["device"]:
                nodes.append((f"/proc/self/fd/{source}", bind["target"]))
                self._show(bind["target"], bind["target"], writable=True)
        for node, target in nodes:
            path = os.path.join(folder, os.path.basename(target))
            if os.path.isdir(node):
                os.mkdir(path)
            elif os.path.exists(node):
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            else:
                continue
            mount(node, path, "none", BIND | RECURSIVE)
        for name, to in LINKS:
            os.symlink(to, os.path.join(folder, name))
        mount(folder, "/dev", "none", BIND | RECURSIVE)

    def _file(self, target: str, fd: int) -> None:
        """A small file of the job's own; Apptainer itself must find the user in them."""
        path = self._path(os.path.basename(target))
        with open(path, "wb") as file:
            file.write(os.read(fd, 1 << 16))
        os.chmod(path, 0o644)
        if target != "/etc/hosts":
            mount(path, target, "none", BIND)
        self._show(path, target, writable=False)

    def _cover(self, target: str) -> None:
        """An empty folder over the server's own, with room for the job's output in it."""
        cover = self.orders["cover"]
        empty = self._path("cover")
        os.makedirs(empty + target[len(cover) :], exist_ok=True)
        self._show(empty, cover, writable=False)

    def _show(self, source: str, target: str, writable: bool) -> None:
        options = f"type=bind,src={quoted(source)},dst={quoted(target)}"
        self.options += ["--mount", options if writable else f"{options},ro"]


def quoted(path: str) -> str:
    """A path as one field of a line of comma-separated values."""
    return '"' + path.replace('"', '""') + '"' if set(path) & set(',"') else path


def become(uid: int) -> None:
    """Be that user, with nothing to gain by execve."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    call(_libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def main(number: int) -> int:
    """Prepare and execute; 125 with a sentence if that cannot be."""
    with open(number, "rb") as file:
        orders = json.loads(file.read())
    uid = int(orders["uid"])
    if not uid:
        sys.stderr.write("dure: Apptainer is never run as root: give the user a unix_uid\n")
        return 125
    try:
        own_namespace(uid)
        stage = Stage(orders)
        root = stage.build()
        become(uid)
        env = dict(os.environ, HOME="/nonexistent", APPTAINER_SILENT="1")
        argv = [*orders["before"], *stage.options, root, *orders["after"]]
        os.execve(argv[0], argv, env)
    except OSError as error:
        sys.stderr.write(f"dure: {error}\n")
    return 125


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
