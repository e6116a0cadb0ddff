"""First program inside a jail: `python -I -S jobinit.py FD`.

Rule: standard library only, syntax of Python 3.9: it runs with whatever Python is in there.

FD is a connection to the supervisor. One JSON object a line comes first: what to run and as
whom (see `Inside`). Then `{"signal": n}` asks for a signal to every process of the job,
`{"signal": n, "catching": true}` only to those that handle it. Told are `{"event":
"started"}`, `{"event": "failed", "why": …}` and, when the command has ended, `{"event":
"ended", "exit_code": …, "signal": …, "exception": …}`. It ends after the last process of
the job, so as process 1 it never takes the rest down with it.

It ignores signals on purpose: a launcher may pass on what was meant for the job, and the job
must see a SIGTERM once.
"""
# ruff: noqa: PTH103, PTH123, S606 - pathlib costs time at each start

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import sys

if not __package__:  # run as a script: find `dure` without the site module
    sys.path.append(os.path.abspath(__file__).rsplit(os.sep, 5)[0])  # noqa: PTH100 - see above

from dure.adapters.runtime.inside.uncaught import RECORDS, collect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

SET_DUMPABLE, CAPBSET_DROP, SET_SECCOMP, SUBREAPER, NO_NEW_PRIVS = 4, 24, 22, 36, 38
FILTER = 2
LAST_CAPABILITY = 63
CAPABILITY_VERSION_3 = 0x20080522
LINE_LIMIT = 8 << 20
OOM_SCORE = "500"
"""The kernel takes the job's own processes before this one, so the end is still told."""

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):  # noqa: N818 - says what is so
    """The jail is not as tight as it must be: nothing is started in it."""


def prctl(option: int, value: int, pointer: object = 0) -> None:
    """Ask the kernel about this process; raise an OSError if it refuses."""
    if libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become(uid: int) -> None:
    """Be that user for good: no groups, no capabilities, nothing to gain by execve."""
    if uid and os.getuid() != uid:
        for capability in range(LAST_CAPABILITY + 1):
            try:
                prctl(CAPBSET_DROP, capability)
            except OSError:
                break  # more than this kernel knows
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    drop_capabilities()
    prctl(NO_NEW_PRIVS, 1)
    # What runs as the same user must not trace this process or read its memory.
    prctl(SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """Empty the sets that outlive a change of user."""
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    if libc.capset(header, bytes(24)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def check() -> None:
    """Refuse to start anything with a capability left."""
    with open("/proc/self/status", "rb") as file:
        status = dict(line.split(b":", 1) for line in file if b":" in line)
    left = [name for name in (b"CapEff", b"CapPrm", b"CapInh", b"CapAmb") if int(status[name], 16)]
    if left:
        words = f"capabilities are left: {b', '.join(left).decode()}"
        raise Refused(words)


def filter_calls(code: bytes) -> None:
    """Install the filter for this process and all that come from it."""
    if not code:
        return
    buffer = ctypes.create_string_buffer(code, len(code))
    address = ctypes.addressof(buffer)
    fprog = struct.pack("HxxxxxxP", len(code) // 8, address)
    prctl(SET_SECCOMP, FILTER, ctypes.create_string_buffer(fprog, len(fprog)))


def execute(config: dict[str, Any], failed: int) -> NoReturn:
    """Become the job's command; what cannot run says so on `failed` and in the log."""
    number = 126
    what = config["cwd"]
    try:
        os.setsid()
        prctl(SET_DUMPABLE, 1)  # else the files of /proc/self are closed to it
        for each in range(1, 32):
            if each not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(each, signal.SIG_DFL)
        # Reaching the limit on a file's size is an error of the write, not the job's end.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(OOM_SCORE)
        limit = int(config.get("processes") or 0)
        if limit:
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
        os.chdir(what)
        argv = list(config["argv"])
        what = argv[0]
        os.execvpe(what, argv, dict(config["env"]))
    except OSError as error:
        number = 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
        os.write(2, f"dure: cannot run {what!r}: {error.strerror}\n".encode())
    except BaseException as error:  # noqa: BLE001 - this process must not live on
        os.write(2, f"dure: cannot run {what!r}: {error!r}\n".encode())
    finally:
        os.write(failed, b"x")
        os._exit(number)


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


def send_all(number: int, catching: bool) -> None:
    """Signal every process of the jail but this one and process 1, each once."""
    try:
        if not catching:
            os.kill(-1, number)  # one step of the kernel: a fork cannot slip out
            return
        for name in os.listdir("/proc"):  # noqa: PTH208 - see above
            if name.isdigit() and int(name) not in (1, os.getpid()) and catches(int(name), number):
                os.kill(int(name), number)
    except OSError:
        pass  # nobody is left


class Init:
    """The job's command and the connection that tells about it."""

    def __init__(self, link: socket.socket) -> None:
        self.link: socket.socket | None = link
        self.buffer = b""
        self.child = 0

    def first_line(self) -> dict[str, Any]:
        """What the supervisor says first; wait for it."""
        assert self.link is not None
        while b"\n" not in self.buffer and len(self.buffer) < LINE_LIMIT:
            data = self.link.recv(65_536)
            if not data:
                sys.exit(125)
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        value = json.loads(line)
        assert isinstance(value, dict)
        return value

    def tell(self, event: str, **fields: object) -> None:
        """One event; a supervisor that is gone hears nothing."""
        if self.link is not None:
            try:
                self.link.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")
            except OSError:
                self.link = None

    def start(self, config: dict[str, Any]) -> None:
        """Start the command; when this returns it has been executed, or could not be."""
        out, into = os.pipe2(os.O_CLOEXEC)
        self.child = os.fork()
        if not self.child:
            execute(config, into)
        os.close(into)
        os.read(out, 1)
        os.close(out)
        self.tell("started")

    def reap(self) -> bool:
        """Take ended children; False when none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid == self.child:
                self.ended(status)

    def ended(self, status: int) -> None:
        """Tell how the command ended; what it has left behind is another matter."""
        signaled = os.WIFSIGNALED(status)
        self.tell(
            "ended",
            exit_code=None if signaled else os.WEXITSTATUS(status),
            signal=os.WTERMSIG(status) if signaled else None,
            exception=collect(RECORDS, self.child),
        )

    def listen(self) -> None:
        """Take what the supervisor asks, or its end."""
        assert self.link is not None
        try:
            data = self.link.recv(65_536)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.link = None  # the server finds what is left by its environment
            return
        self.buffer += data
        self.obey()

    def obey(self) -> None:
        """Carry out the whole lines that have come."""
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            order = json.loads(line)
            send_all(int(order["signal"]), bool(order.get("catching")))

    def loop(self, wake: int) -> None:
        """Until the last process of the job has gone."""
        self.obey()  # a stop may have come with the first line
        while self.reap():
            watched = [wake] if self.link is None else [wake, self.link.fileno()]
            for ready in select.select(watched, [], [])[0]:
                if ready == wake:
                    os.read(wake, 4096)
                else:
                    self.listen()


def main(number: int) -> int:
    """Set up, start, wait; 125 if nothing could be started."""
    link = socket.socket(fileno=number)
    link.set_inheritable(False)
    init = Init(link)
    config = init.first_line()
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)
    out, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(into, warn_on_full_buffer=False)
    try:
        become(int(config.get("uid") or 0))
        check()
        filter_calls(base64.b64decode(config.get("seccomp") or ""))
        os.makedirs(RECORDS, mode=0o700, exist_ok=True)
        if os.getpid() != 1:
            prctl(SUBREAPER, 1)
        link.setblocking(False)
        init.start(config)
    except (OSError, Refused) as error:
        init.tell("failed", why=str(error))
        return 125
    init.loop(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
