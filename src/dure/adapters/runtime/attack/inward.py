"""Attacks on processes, on the job's own powers, on the kernel and devices. See `table`."""
# ruff: noqa: PTH108, PTH110, PTH118, PTH208, S603, S607 - few imports

from __future__ import annotations

import ctypes
import os
import subprocess

from dure.adapters.runtime.attack.table import WRONLY, attack, closes, libc, makes, ok, opens, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NUMBERS = {"x86_64": (250, 321, 323), "aarch64": (219, 280, 282)}
KEYCTL, BPF, USERFAULTFD = NUMBERS.get(os.uname().machine, (-1, -1, -1))


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
