"""What the attacks aim at: files of others, services, a victim, devices. All made here.

Nothing of the machine itself is a target that could be harmed, and everything is taken away
again. As root the scene has a second user and another machine (a network namespace).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from dure.core.model import Value

ME, OTHER = 64_101, 64_102
"""Users of the scene on a server that is root: nobody's on an ordinary machine."""
FAR_AWAY = "192.0.2.1"
"""An address that is kept for documentation: no real network has it."""
DISKS = ("vda", "sda", "nvme0n1", "xvda", "mmcblk0", "loop0")
VICTIM = "import sys, time; print(flush=True); time.sleep(300)"


class Scene(Value, frozen=True, kw_only=True):
    """Where everything is; `targets` is what the attacks are told."""

    base: Path
    state: Path
    workdir: Path
    devices: Path
    uid: int
    """The attacker's own user; 0: the one who runs this."""
    targets: dict[str, str | int | bool]


@contextlib.contextmanager
def set_up(outside: tuple[str, int] | None) -> Iterator[Scene]:
    """Build it, and leave nothing. Without another machine this one's address stands in."""
    root = os.getuid() == 0
    base = Path(tempfile.mkdtemp(prefix="dure-attack-", dir="/var/tmp"))
    base.chmod(0o755)
    secret = f"secret-{secrets.token_hex(8)}"
    os.environ["DURE_ATTACK_SECRET"] = secret
    with contextlib.ExitStack() as stack:
        stack.callback(os.environ.pop, "DURE_ATTACK_SECRET")
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        files = _files(base, secret, root)
        services = stack.enter_context(_services(base, outside))
        victim = stack.enter_context(_victim(secret, ME if root else 0))
        shared = stack.enter_context(_shared_memory())
        targets: dict[str, str | int | bool] = {
            "secret": secret,
            "control": False,
            "stranger": OTHER,
            **files,
            **services,
            **victim,
            **shared,
        }
        yield Scene(
            base=base,
            state=base / "state",
            workdir=base / "work",
            devices=base / "dev",
            uid=ME if root else 0,
            targets=targets,
        )
        for name in ("left_tmp", "left_shm"):
            Path(str(targets[name])).unlink(missing_ok=True)


def _files(base: Path, secret: str, root: bool) -> dict[str, str]:
    me, other = (ME, OTHER) if root else (-1, -1)
    made = {
        "other_644": (base / "homes" / "other" / "notes", other, 0o644),
        "other_output": (base / "state" / "runs" / "9" / "1" / "out" / "result", other, 0o600),
        "other_log": (base / "state" / "runs" / "9" / "1" / "log", -1, 0o600),
        "own_other_job": (base / "state" / "runs" / "8" / "1" / "out" / "result", me, 0o600),
        "database": (base / "state" / "dure.db", -1, 0o600),
    }
    for path, owner, mode in made.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secret)
        path.chmod(mode)
        os.chown(path, owner, owner)
    (base / "state").chmod(0o700)
    for name in ("work", "dev", "mount"):
        (base / name).mkdir()
    if root:
        os.chown(base / "work", ME, ME)
        shutil.copy("/bin/bash", base / "work" / "suid")
        (base / "work" / "suid").chmod(0o4755)
    _gpus(base / "dev", root)
    disk = next((d for d in DISKS if _opens(f"/dev/{d}")), DISKS[0])
    token = secrets.token_hex(6)
    return {name: str(path) for name, (path, _, _) in made.items()} | {
        "homes": str(base / "homes"),
        "workdir": str(base / "work"),
        "suid": str(base / "work" / "suid"),
        "mountpoint": str(base / "mount"),
        "disk": f"/dev/{disk}",
        "gpu_own": "/dev/nvidia0",
        "gpu_other": "/dev/nvidia1",
        "left_tmp": f"/tmp/dure-attack-{token}",  # noqa: S108 - the place that is attacked
        "left_shm": f"/dev/shm/dure-attack-{token}",  # noqa: S108 - likewise
    }


def _opens(path: str) -> bool:
    """Whether this process may read it: the attack on it can be proven then."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _gpus(folder: Path, root: bool) -> None:
    """Two nodes that stand in for cards: character devices like theirs, of `null`."""
    for index in (0, 1):
        node = folder / f"nvidia{index}"
        if root:
            os.mknod(node, 0o20666, os.makedev(1, 3))
            node.chmod(0o666)
        else:
            node.symlink_to("/dev/null")


@contextlib.contextmanager
def _services(base: Path, outside: tuple[str, int] | None) -> Iterator[dict[str, str | int]]:
    """Greeters on TCP and on unix sockets of both kinds."""
    abstract = f"dure-attack-{secrets.token_hex(6)}"
    tcp = socket.create_server(("0.0.0.0", 0))  # noqa: S104 - reachable from other machines is the point
    named, nameless = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    named.bind(str(base / "host.sock"))
    (base / "host.sock").chmod(0o777)
    nameless.bind("\0" + abstract)
    listeners = [tcp, named, nameless]
    for listener in listeners:
        listener.listen(8)
        threading.Thread(target=_greet, args=(listener,), daemon=True).start()
    port = tcp.getsockname()[1]
    try:
        yield {
            "port": port,
            "outside": outside[0] if outside else _address(),
            "outside_port": outside[1] if outside else port,
            "address": _address(),
            "abstract": abstract,
            "unix": str(base / "host.sock"),
        }
    finally:
        for listener in listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def _greet(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.sendall(b"hello")


def _address() -> str:
    """An address of this machine that is not its loopback, if it has one. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((FAR_AWAY, 9))
            return str(sock.getsockname()[0])
        except OSError:
            return "127.0.0.2"


@contextlib.contextmanager
def _victim(secret: str, uid: int) -> Iterator[dict[str, str | int]]:
    """A process of the attacker's own user outside of every jail."""
    mark = f"dure-victim-{secrets.token_hex(6)}"
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    as_user = {"user": uid, "group": uid, "extra_groups": []} if uid else {}
    process = subprocess.Popen(  # noqa: S603 - our own program
        [python, "-I", "-S", "-c", VICTIM, mark],
        env={"SECRET": secret},
        stdout=subprocess.PIPE,
        cwd="/",
        **as_user,  # type: ignore[call-overload]
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield {"victim": process.pid, "mark": mark}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def _shared_memory() -> Iterator[dict[str, str | int]]:
    libc = ctypes.CDLL(None, use_errno=True)
    key = 0x44000000 | secrets.randbelow(1 << 24)
    identity = libc.shmget(key, 4096, 0o1000 | 0o666)
    name = f"/dure-attack-{secrets.token_hex(6)}"
    queue = libc.mq_open(name.encode(), os.O_RDWR | os.O_CREAT, 0o666, None)
    if queue >= 0:
        os.fchmod(queue, 0o666)
    try:
        yield {"shm_key": key, "queue": name}
    finally:
        libc.shmctl(identity, 0, None)
        libc.mq_unlink(name.encode())
