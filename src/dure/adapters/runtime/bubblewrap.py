"""Jails by bubblewrap: with a user namespace, or made by root for a job that becomes its user.

All of its arguments go through an open file (`--args`), for `ps` shows a command line to
everybody. The first program inside is process 1: bubblewrap itself passes no signal on.
"""

from __future__ import annotations

from dure.adapters.runtime import jail
from dure.adapters.runtime.jail import Yard
from dure.ports import Grant, LaunchOrder, RuntimeCommand

ARGS_FD, PASSWD_FD, GROUP_FD, HOSTS_FD = 4, 5, 6, 7
SIZED = (0, 8)
"""First version that knows `--size`."""
NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts")
# What the first program needs to become the job's user; it keeps nothing of it.
KERNEL = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus")
UNNAMED = 1000
"""What a job of a root server sees as its user if it has none of its own: not root."""
ROOT_KEEPS = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")


class BubblewrapRuntime:
    """`uid` is the server's own user; a grant's `uid` needs a server that is root."""

    name = "bubblewrap"
    confines = True

    def __init__(
        self, yard: Yard, *, program: str, version: tuple[int, ...] = SIZED, uid: int
    ) -> None:
        self._yard = yard
        self._program = program
        self._sized = version >= SIZED
        self._uid = uid

    def command(self, order: LaunchOrder, grant: Grant) -> RuntimeCommand:
        """Bubblewrap around `jobinit` around the job's command."""
        inner = grant.uid or self._uid or UNNAMED
        args = [*self._namespaces(grant), *self._mounts(order, grant)]
        return RuntimeCommand(
            argv=(
                self._program,
                "--args",
                str(ARGS_FD),
                "--",
                *jail.jobinit(self._yard.host.python),
            ),
            env=jail.launcher_env(order, grant),
            cwd="/",
            files={
                ARGS_FD: b"".join(arg.encode("utf-8", "surrogateescape") + b"\0" for arg in args),
                PASSWD_FD: jail.passwd(inner),
                GROUP_FD: jail.group(inner),
                HOSTS_FD: jail.HOSTS,
            },
            inside=jail.first_program(self._yard, order, grant),
        )

    def _namespaces(self, grant: Grant) -> list[str]:
        args = [*NAMESPACES, "--unshare-cgroup-try", "--hostname", "job", "--new-session"]
        args += ["--as-pid-1", "--cap-drop", "ALL"]
        if grant.uid:
            for capability in ROOT_KEEPS:
                args += ["--cap-add", capability]
        else:
            args.append("--unshare-user")
            if self._uid == 0:
                args += ["--uid", str(UNNAMED), "--gid", str(UNNAMED)]
        return args

    def _mounts(self, order: LaunchOrder, grant: Grant) -> list[str]:
        args: list[str] = []
        for name, target in self._yard.host.links:
            args += ["--symlink", target, name]
        args += ["--proc", "/proc", "--dev", "/dev"]
        if not grant.uid and self._uid == 0:
            # The kernel asks there who owns a file, not for a capability: root is root.
            for path in KERNEL:
                args += ["--ro-bind-try", path, path]
        for folder in ("/tmp", "/var/tmp", "/dev/shm", jail.HOME):  # noqa: S108 - the jail's own
            args += self._own_memory(folder, grant)
        args += ["--dir", "/run"]
        for fd, path in (
            (PASSWD_FD, "/etc/passwd"),
            (GROUP_FD, "/etc/group"),
            (HOSTS_FD, "/etc/hosts"),
        ):
            args += ["--perms", "0444", "--ro-bind-data", str(fd), path]
        covered = jail.covers(self._yard, order)
        for bind in jail.binds(self._yard, order, grant):
            if covered and bind.target == grant.output_dir:
                args += ["--perms", "0755", "--tmpfs", self._yard.state_dir]
            # Else bubblewrap makes the folders above as closed as the one that is mounted.
            args += ["--dir", bind.target.rsplit("/", 1)[0] or "/"]
            how = "--dev-bind" if bind.device else "--bind" if bind.writable else "--ro-bind"
            args += [how, bind.source, bind.target]
        if covered:
            args += ["--remount-ro", self._yard.state_dir]
        return [*args, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]

    def _own_memory(self, folder: str, grant: Grant) -> list[str]:
        """A folder in memory that counts as the job's; everybody in there may write."""
        size = ["--size", str(grant.memory_mib << 20)] if self._sized and grant.memory_mib else []
        return [*size, "--perms", "1777", "--tmpfs", folder]
