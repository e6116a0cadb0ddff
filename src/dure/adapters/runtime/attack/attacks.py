"""The attacks, run as a job: `python -I -S attacks.py TARGETS`.

Rule: standard library only, syntax of Python 3.9: it runs inside the jail. An attack returns
something true if it has worked and raises or returns nothing if it was refused. None does
harm where it works: files of the system are opened and not written, signals are number 0.
"""
# ruff: noqa: PTH108, PTH110, PTH118, PTH120, PTH123, PTH208, S603, S607, T201 - a program of its own

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Attack = Callable[[dict[str, Any]], object]

ATTACKS: dict[str, Attack] = {}
TIMEOUT_S = 2
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


# -- other people's files ------------------------------------------------------------


@attack("files: read another user's readable file")
def _other_readable(t: dict[str, Any]) -> object:
    return t["secret"] in text(t["other_644"])


@attack("files: read another user's job output")
def _other_output(t: dict[str, Any]) -> object:
    return t["secret"] in text(t["other_output"])


@attack("files: read another user's job log")
def _other_log(t: dict[str, Any]) -> object:
    return t["secret"] in text(t["other_log"])


@attack("files: read the output of an own other job")
def _own_other(t: dict[str, Any]) -> object:
    return t["secret"] in text(t["own_other_job"])


@attack("files: read the server's database")
def _database(t: dict[str, Any]) -> object:
    return t["secret"] in text(t["database"])


@attack("files: read the server's environment of this job (spec.json)")
def _spec(t: dict[str, Any]) -> object:
    return opens(os.path.join(t["run_dir"], "spec.json"))


@attack("files: talk to the supervisor's socket")
def _supervisor(t: dict[str, Any]) -> object:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.path.join(t["run_dir"], "ctl.sock"))
    return True


@attack("files: list the home folders")
def _homes(t: dict[str, Any]) -> object:
    return [name for name in os.listdir(t["homes"]) if name != "job"]


@attack("files: write the workdir")
def _workdir(t: dict[str, Any]) -> object:
    return makes(t["workdir"])


for _folder in ("/", "/usr", "/etc", "/opt", "/var", "/run"):

    @attack(f"files: write {_folder}")
    def _write(t: dict[str, Any], folder: str = _folder) -> object:
        del t
        return makes(folder)


@attack("files: leave something in the machine's /tmp")
def _tmp(t: dict[str, Any]) -> object:
    open(t["left_tmp"], "w", encoding="ascii").close()
    return "on the machine" if t["control"] else ""  # the stage looks


@attack("files: leave something in the machine's /dev/shm")
def _shm(t: dict[str, Any]) -> object:
    open(t["left_shm"], "w", encoding="ascii").close()
    return "on the machine" if t["control"] else ""  # the stage looks


@attack("files: read /etc/shadow")
def _shadow(t: dict[str, Any]) -> object:
    del t
    return opens("/etc/shadow")


# -- network -------------------------------------------------------------------------


def fetch(host: str, port: int) -> bool:
    """Connect and read the greeting."""
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as sock:
        return bool(sock.recv(16))


@attack("network: TCP to another machine")
def _tcp_outside(t: dict[str, Any]) -> object:
    return fetch(t["outside"], t["outside_port"])


@attack("network: TCP to the machine's own address")
def _tcp_machine(t: dict[str, Any]) -> object:
    return fetch(t["address"], t["port"])


@attack("network: TCP to a service on the machine's loopback")
def _tcp_loopback(t: dict[str, Any]) -> object:
    return fetch("127.0.0.1", t["port"])


@attack("network: UDP to another machine")
def _udp(t: dict[str, Any]) -> object:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return sock.sendto(b"x", (t["outside"], 9))


@attack("network: raw socket")
def _raw(t: dict[str, Any]) -> object:
    del t
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return True


@attack("network: packet socket")
def _packet(t: dict[str, Any]) -> object:
    del t
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    return True


@attack("network: socket of a family that no namespace holds")
def _families(t: dict[str, Any]) -> object:
    del t
    for family in (38, 40, 31, 30, 21, 29, 44, 17):  # alg, vsock, bluetooth, tipc, …
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
            try:
                socket.socket(family, kind).close()
            except OSError:
                continue
            return family
    return None


@attack("network: abstract unix socket of the machine")
def _abstract(t: dict[str, Any]) -> object:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + t["abstract"])
        return bool(sock.recv(16))


@attack("network: unix socket in the machine's file system")
def _unix(t: dict[str, Any]) -> object:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(t["unix"])
        return bool(sock.recv(16))


# -- processes -----------------------------------------------------------------------


def is_victim(t: dict[str, Any]) -> bool:
    """Whether the victim is what its number names here too."""
    if t["mark"] not in text(f"/proc/{t['victim']}/cmdline"):
        words = "another process has that number in here"
        raise ProcessLookupError(words)
    return True


@attack("processes: see those of the machine")
def _see(t: dict[str, Any]) -> object:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if t["mark"] in text(f"/proc/{name}/cmdline"):
                    return name
            except OSError:
                continue
    return None


@attack("processes: read the environment of one of the same user")
def _environ(t: dict[str, Any]) -> object:
    return is_victim(t) and t["secret"] in text(f"/proc/{t['victim']}/environ")


@attack("processes: signal one of the same user by its number")
def _signal(t: dict[str, Any]) -> object:
    os.kill(t["victim"], 0)
    return is_victim(t)


@attack("processes: signal everybody")
def _signal_all(t: dict[str, Any]) -> object:
    del t
    os.kill(-1, 0)
    return True


@attack("processes: trace one of the same user")
def _trace(t: dict[str, Any]) -> object:
    is_victim(t)
    seize, detach = 0x4206, 17
    ok(libc.ptrace(seize, t["victim"], 0, 0))
    libc.ptrace(detach, t["victim"], 0, 0)
    return True


@attack("processes: read the memory of the jail's first program")
def _memory(t: dict[str, Any]) -> object:
    return opens(f"/proc/{t['victim'] if t['control'] else os.getppid()}/mem")


@attack("processes: System V memory of the machine")
def _sysv(t: dict[str, Any]) -> object:
    return ok(libc.shmget(t["shm_key"], 0, 0))


@attack("processes: POSIX message queue of the machine")
def _mqueue(t: dict[str, Any]) -> object:
    return ok(libc.mq_open(t["queue"].encode(), os.O_RDONLY))


@attack("processes: environment of the server leaks in")
def _leak(t: dict[str, Any]) -> object:
    return any(t["secret"] in value for value in os.environ.values())


@attack("processes: real-time priority")
def _realtime(t: dict[str, Any]) -> object:
    del t
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


# -- power ---------------------------------------------------------------------------


@attack("power: a set-user-id program gives root")
def _setuid_program(t: dict[str, Any]) -> object:
    done = subprocess.run(
        [t["suid"], "-p", "-c", "id -u"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() == "0" and os.getuid() != 0


@attack("power: become another user")
def _become(t: dict[str, Any]) -> object:
    pid = os.fork()
    if not pid:
        try:
            os.setresuid(t["stranger"], t["stranger"], t["stranger"])
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@attack("power: join a group")
def _group(t: dict[str, Any]) -> object:
    os.setgroups([t["stranger"]])
    return True


@attack("power: a capability is left")
def _capability(t: dict[str, Any]) -> object:
    del t
    lines = text("/proc/self/status").splitlines()
    sets = [line.split()[1] for line in lines if line.startswith(("CapEff", "CapPrm", "CapAmb"))]
    return any(int(value, 16) for value in sets)


@attack("power: programs may still gain privileges")
def _new_privileges(t: dict[str, Any]) -> object:
    del t
    return "NoNewPrivs:\t0" in text("/proc/self/status")


@attack("power: new user namespace")
def _namespace(t: dict[str, Any]) -> object:
    del t
    return _in_child(lambda: ok(libc.unshare(0x10000000)))


@attack("power: new user namespace by clone")
def _clone(t: dict[str, Any]) -> object:
    del t
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "true"],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


@attack("power: mount")
def _mount(t: dict[str, Any]) -> object:
    folder = t["mountpoint"] if t["control"] else "/tmp"  # noqa: S108 - the jail's own
    ok(libc.mount(b"none", folder.encode(), b"tmpfs", 0, None))
    libc.umount2(folder.encode(), 2)
    return True


@attack("power: make the system writable again")
def _remount(t: dict[str, Any]) -> object:
    folder = t["mountpoint"] if t["control"] else "/usr"
    bind_remount = 4096 | 32
    if t["control"]:
        ok(libc.mount(folder.encode(), folder.encode(), None, 4096, None))
    ok(libc.mount(None, folder.encode(), None, bind_remount, None))
    if t["control"]:
        libc.umount2(folder.encode(), 2)
    return True


@attack("power: join the machine's namespaces")
def _setns(t: dict[str, Any]) -> object:
    del t
    fd = os.open("/proc/self/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
    return _in_child(lambda: ok(libc.setns(fd, 0)))


def _in_child(action: Callable[[], object]) -> bool:
    """Try it in a child, which alone is changed by it."""
    pid = os.fork()
    if not pid:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- kernel and devices --------------------------------------------------------------


@attack("kernel: core_pattern (runs a program as root)")
def _core_pattern(t: dict[str, Any]) -> object:
    del t
    return opens("/proc/sys/kernel/core_pattern", WRONLY)


@attack("kernel: settings of devices (/sys)")
def _sys(t: dict[str, Any]) -> object:
    del t
    for path in ("/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/uevent_helper"):
        if os.path.exists(path):
            return opens(path, WRONLY)
    return None


@attack("kernel: drop_caches")
def _drop_caches(t: dict[str, Any]) -> object:
    del t
    return opens("/proc/sys/vm/drop_caches", WRONLY)


@attack("kernel: sysrq-trigger")
def _sysrq(t: dict[str, Any]) -> object:
    del t
    return opens("/proc/sysrq-trigger", WRONLY)


@attack("kernel: messages")
def _messages(t: dict[str, Any]) -> object:
    del t
    size_of_buffer = 10
    return ok(libc.klogctl(size_of_buffer, None, 0))


@attack("kernel: keyring")
def _keyring(t: dict[str, Any]) -> object:
    del t
    user_keyring, get_id = -4, 0
    return ok(libc.syscall(KEYCTL, get_id, user_keyring, 0))


@attack("kernel: load a BPF program")
def _bpf(t: dict[str, Any]) -> object:
    del t
    attributes = ctypes.create_string_buffer(b"\x02\0\0\0\x04\0\0\0\x04\0\0\0\x01\0\0\0", 72)
    fd = libc.syscall(BPF, 0, attributes, 72)  # BPF_MAP_CREATE of one array
    return closes(fd)


@attack("kernel: io_uring")
def _io_uring(t: dict[str, Any]) -> object:
    del t
    fd = libc.syscall(425, 4, ctypes.create_string_buffer(120))
    return closes(fd)


@attack("kernel: userfaultfd")
def _userfaultfd(t: dict[str, Any]) -> object:
    del t
    user_mode_only = 1
    fd = libc.syscall(USERFAULTFD, user_mode_only)
    return closes(fd)


@attack("kernel: type into the terminal (TIOCSTI)")
def _tiocsti(t: dict[str, Any]) -> object:
    del t
    ours, theirs = os.openpty()
    os.close(ours)
    result = libc.ioctl(theirs, 0x5412, b"\0")
    if result < 0 and ctypes.get_errno() == 5:
        return True  # EIO: it reached the terminal code of the kernel
    return ok(result)


@attack("devices: the machine's disk")
def _disk(t: dict[str, Any]) -> object:
    return opens(t["disk"])


@attack("devices: make a node of the disk")
def _mknod(t: dict[str, Any]) -> object:
    path = os.path.join(t["out"], "node")
    os.mknod(path, 0o60600, os.makedev(254, 0))
    os.unlink(path)
    return True


@attack("devices: kernel memory log")
def _kmsg(t: dict[str, Any]) -> object:
    del t
    return opens("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)


@attack("devices: fuse")
def _fuse(t: dict[str, Any]) -> object:
    del t
    return opens("/dev/fuse", os.O_RDWR)


@attack("devices: a GPU that was not granted")
def _other_gpu(t: dict[str, Any]) -> object:
    return opens(t["gpu_other"], os.O_RDWR)


@attack("own: write the output folder")
def _own_output(t: dict[str, Any]) -> object:
    return makes(t["out"])


@attack("own: the GPU that was granted")
def _own_gpu(t: dict[str, Any]) -> object:
    return opens(t["gpu_own"], os.O_RDWR)


NUMBERS = {"x86_64": (250, 321, 323), "aarch64": (219, 280, 282)}
KEYCTL, BPF, USERFAULTFD = NUMBERS.get(os.uname().machine, (-1, -1, -1))


def main(targets: str) -> int:
    """Try everything; print one JSON object from name to what came of it."""
    t = json.loads(targets)
    t["out"] = os.environ["JOB_OUTPUT_DIR"]
    t["run_dir"] = os.path.dirname(t["out"])
    results: dict[str, list[object]] = {}
    for name, function in ATTACKS.items():
        try:
            found = function(t)
            results[name] = [bool(found), str(found)[:80] if found else "refused"]
        except (OSError, ValueError, AttributeError) as error:
            results[name] = [False, str(error)[:80]]
    print("ATTACKS " + json.dumps(results), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
