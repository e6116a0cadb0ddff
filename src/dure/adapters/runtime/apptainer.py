"""Jails by Apptainer, as the job's user: never as root.

Without an image the machine's own system is shown, read-only, like bubblewrap does. A server
that is root goes through `doorway`, which prepares the mounts and becomes the user first.
"""

from __future__ import annotations

import json
from pathlib import Path

from dure.adapters.runtime import jail
from dure.adapters.runtime.jail import Bind, Yard
from dure.ports import Grant, LaunchOrder, RuntimeCommand

DOORWAY_FD, PASSWD_FD, GROUP_FD, HOSTS_FD = 4, 5, 6, 7
ROOT = "apptainer-root"
"""In the state folder: empty folders and links, into which this machine's system is bound."""
EMPTY = ("dev", "etc", "home/job", "proc", "run/dure", "sys", "tmp", "usr", "var/tmp")
DOORWAY = str(Path(__file__).with_name("doorway.py"))
MEMORY_MIB = 1024
"""Size of /tmp where nothing is known of the job's share of memory."""


def make_root(yard: Yard) -> str:
    """Make the empty root file system, if it is not there; where it is."""
    root = Path(yard.state_dir, ROOT)
    for name in EMPTY:
        (root / name).mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in ("passwd", "group", "hosts"):
        (root / "etc" / name).touch()
    for name, target in yard.host.links:
        link = root / name.lstrip("/")
        if not link.is_symlink():
            link.symlink_to(target)
    return str(root)


class ApptainerRuntime:
    """`root` is an image, a folder or what `make_root` made; `uid` is the server's user."""

    name = "apptainer"
    confines = True

    def __init__(self, yard: Yard, *, program: str, root: str, uid: int) -> None:
        self._yard = yard
        self._program = program
        self._root = root
        self._uid = uid

    def command(self, order: LaunchOrder, grant: Grant) -> RuntimeCommand:
        """Apptainer around `jobinit` around the job's command."""
        uid = grant.uid or self._uid
        return RuntimeCommand(
            argv=(self._yard.host.python, "-I", "-S", "-X", "utf8", DOORWAY, str(DOORWAY_FD)),
            env=jail.launcher_env(order, grant),
            cwd="/",
            files={
                DOORWAY_FD: json.dumps(self._doorway(order, grant)).encode(),
                PASSWD_FD: jail.passwd(uid),
                GROUP_FD: jail.group(uid),
                HOSTS_FD: jail.HOSTS,
            },
            inside=jail.first_program(self._yard, order, grant),
        )

    def _doorway(self, order: LaunchOrder, grant: Grant) -> dict[str, object]:
        """What `doorway` does: mounts, then a user, then Apptainer's command line."""
        covered = jail.covers(self._yard, order)
        binds = jail.binds(self._yard, order, grant)
        return {
            "uid": grant.uid or self._uid,
            "cover": self._yard.state_dir if covered else "",
            "root": self._root,
            "binds": [_named(b) for b in binds],
            "files": {"/etc/passwd": PASSWD_FD, "/etc/group": GROUP_FD, "/etc/hosts": HOSTS_FD},
            "size_mib": grant.memory_mib or MEMORY_MIB,
            "before": [self._program, "-q", "-s", "exec", *CONTAIN],
            "after": list(jail.jobinit(self._yard.host.python)),
        }


CONTAIN = (
    "--containall",
    "--no-home",
    "--cleanenv",
    "--net",
    "--network",
    "none",
    "--no-mount",
    "bind-paths,hostfs,tmp,home,cwd,sys",
    "--no-init",
    "--pwd",
    "/",
)


def _named(bind: Bind) -> dict[str, object]:
    return {
        "source": bind.source,
        "target": bind.target,
        "writable": bind.writable,
        "device": bind.device,
    }
