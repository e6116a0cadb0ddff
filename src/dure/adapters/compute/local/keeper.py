"""What the supervisor does between the start of a job's command and its last process.

Rule: standard library only, syntax of Python 3.9, few imports: they cost time in each job.
"""
# ruff: noqa: PTH103, PTH104, PTH108, PTH109, PTH110, PTH112, PTH118, PTH120, PTH123, SIM105, S606 - as above

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time

from dure.adapters.compute.local.processes import (
    Tree,
    catches,
    descendants,
    marked,
    processes,
    send_signal,
)

TYPE_CHECKING = False  # typing itself is too slow to import
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

LINE_LIMIT = 65_536
TAIL_BYTES = 16_384
POLL_S = 0.2
"""How often processes are looked for that are no children of this one."""


def stamp() -> dict[str, int]:
    """Now, by the wall and by the clock that nobody can set."""
    boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return {"wall_ms": time.time_ns() // 1_000_000, "boot_ms": boot // 1_000_000}


def boot_id() -> str:
    """Name of this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def tail(path: str, size: int) -> str:
    """The last `size` bytes of a file as text."""
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            return file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""


def put(name: str, value: Fields, sync: bool) -> None:
    """Replace a file whole; with `sync` it also survives a power cut."""
    fd = os.open(f"{name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(value).encode())
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.rename(f"{name}.tmp", name)
    except OSError:
        os.unlink(f"{name}.tmp")
        raise


def restore(home: str, spec: Fields) -> bool:
    """Make a run directory anew that is gone, with this process's lock on it."""
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
        os.chdir(home)
        if not os.path.exists("lock"):
            lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the end
            put("spec.json", spec, sync=False)
    except OSError:
        return False
    return True


def read_json(name: str) -> Fields | None:
    """A file of the run directory, if it is there and whole."""
    try:
        with open(name, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def execute(spec: Fields, log: int, umask: int) -> None:
    """Become the job's command. Never returns: what cannot run exits 127 or 126."""
    number = 126
    what = "?"
    try:
        argv = list(spec["argv"])
        what = cwd = str(spec.get("cwd") or "out")
        os.setsid()
        for number in range(1, 32):
            # Whatever the server was started with (a shell's `&` ignores SIGQUIT).
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.umask(umask)
        os.chdir(cwd)
        what = argv[0]
        limit(spec)
        os.execvpe(what, argv, dict(spec["env"]))
    except OSError as error:
        number = 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
        os.write(2, f"dure: cannot run {what!r}: {error.strerror}\n".encode())
    except BaseException as error:  # noqa: BLE001 - this process must not live on
        os.write(2, f"dure: cannot run {what!r}: {error!r}\n".encode())
    finally:
        os._exit(number)


def limit(spec: Fields) -> None:
    """Limits that the job cannot raise again."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file_mib = int(spec.get("file_limit_mib") or 0)
    if file_mib:
        # The write fails, as the policy says; the default action would kill the job.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_mib << 20, file_mib << 20))
    data_mib = int(spec.get("data_limit_mib") or 0)
    if data_mib:
        resource.setrlimit(resource.RLIMIT_DATA, (data_mib << 20, data_mib << 20))


class Client:
    """One open connection and what it has sent of an unfinished line."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.buffer = b""

    def lines(self) -> list[bytes] | None:
        """Whole lines that have come; None: the connection is over."""
        try:
            data = self.sock.recv(LINE_LIMIT)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        self.buffer += data
        if not data or len(self.buffer) > LINE_LIMIT:
            return None
        *whole, self.buffer = self.buffer.split(b"\n")
        return whole

    def tell(self, event: str) -> None:
        """Send an event; a client that does not read learns it from the files."""
        try:
            self.sock.send(json.dumps({"event": event}).encode() + b"\n")
        except OSError:
            pass


class Supervisor:
    """State of one run. Everything happens in `run`, one step after another."""

    def __init__(self, spec: Fields, listener: socket.socket, umask: int) -> None:
        self.spec = spec
        self.listener = listener
        self.umask = umask
        self.clients: dict[int, Client] = {}
        self.poll = select.poll()
        self.poll.register(listener, select.POLLIN)
        self.log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.boot_id = boot_id()
        self.copier = 0
        self.command = 0
        self.limit_at: float | None = None
        self.warned = False
        self.timed_out = False
        self.term_at: float | None = None
        self.kill_after = 0.0
        self.killing = False
        self.childless = False
        self.strangers = False
        self.exit: Fields | None = None
        self.freed = False
        self.unsaved: dict[str, Fields] = {}
        self.saved: dict[str, Fields] = {}
        self.home = os.getcwd()
        self.unsaid: list[str] = []
        self.said: list[str] = []

    def number(self, key: str) -> float:
        """A number of the spec; absent is 0."""
        return float(self.spec.get(key) or 0)

    # -- life --

    def run(self) -> None:
        """Until no process of the job is left and that is on disk."""
        wake = self._wake_on_child()
        stop = read_json("stop.json")
        if stop is not None:
            self._never_started("stopped before it started")
        elif self.spec.get("copy_from") and not os.path.isdir("out"):
            self.copier = self._copy()
        else:
            self._start()
        while True:
            self._reap()
            self._clock()
            self._check_freed()
            self._save()
            if self.freed and not self.unsaved:
                return
            for fd, _ in self.poll.poll(self._wait_ms()):
                self._ready(fd, wake)

    def _wake_on_child(self) -> int:
        out, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        self.poll.register(out, select.POLLIN)
        return out

    def _copy(self) -> int:
        """Fill `out` from an earlier attempt's, in a process that dies with this one."""
        pid = os.fork()
        if pid:
            return pid
        try:
            os.dup2(self.log, 1)
            os.dup2(self.log, 2)
            program = os.path.join(os.path.dirname(__file__), "outcopy.py")
            args = [sys.executable, "-I", "-S", "-X", "utf8", program]
            os.execv(sys.executable, [*args, str(self.spec["copy_from"]), "out"])
        finally:
            os._exit(1)

    def _start(self) -> None:
        os.makedirs("out", mode=0o700, exist_ok=True)
        begun, now = stamp(), time.monotonic()
        out, into = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if not pid:
            execute(self.spec, self.log, self.umask)
        os.close(into)
        os.read(out, 1)  # ends when the command is executed: it has its own session now
        os.close(out)
        self.command = pid
        if self.spec.get("time_limit_s") is not None:
            self.limit_at = now + self.number("time_limit_s")
        self.unsaved["status.json"] = {"pid": pid, "started": begun, "boot_id": self.boot_id}
        self.unsaid.append("started")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return
            if not pid:
                self.childless = False
                return
            if pid == self.command:
                self._ended(status)
            elif pid == self.copier:
                self._copied(status)

    def _copied(self, status: int) -> None:
        self.copier = 0
        if self.term_at is not None:
            self._never_started("stopped before it started")
        elif status == 0:
            self._start()
        else:
            text = "dure: the output of the earlier attempt could not be copied\n"
            os.write(self.log, text.encode())
            self._never_started(tail("log", TAIL_BYTES), exit_code=125)

    def _never_started(self, why: str, exit_code: int | None = None) -> None:
        self.exit = {"exit_code": exit_code, "stderr_tail": why, "ended": stamp()}
        self._report_exit()

    def _ended(self, status: int) -> None:
        signaled = os.WIFSIGNALED(status)
        self.exit = {
            "exit_code": None if signaled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signaled else None,
            "ended": stamp(),
        }
        self._report_limit()
        self.exit["stderr_tail"] = tail("log", TAIL_BYTES)
        self._report_exit()

    def _report_limit(self) -> None:
        """Say in the log itself why it stops short."""
        size = int(self.number("file_limit_mib")) << 20
        if size and os.fstat(self.log).st_size >= size:
            text = f"\ndure: the log reached its limit of {size >> 20} MiB; the rest is missing\n"
            os.write(self.log, text.encode())

    def _report_exit(self) -> None:
        assert self.exit is not None
        self.exit["timed_out"] = self.timed_out
        self.exit["vram_limited"] = self.number("data_limit_mib") > 0
        self.exit["boot_id"] = self.boot_id
        self.unsaved["exit.json"] = self.exit
        self.unsaid.append("exited")

    def _check_freed(self) -> None:
        if self.exit is None or self.freed:
            return
        # No children means no descendants: the kernel hands every orphan to this process.
        self.strangers = self.childless and bool(self._others(processes()))
        if self.childless and not self.strangers:
            self.freed = True
            self.exit["freed"] = stamp()
            self.unsaved["exit.json"] = self.exit
            self.unsaid.append("freed")
        elif self.term_at is None:
            self._stop(self.number("leftover_kill_s"))

    # -- signals --

    def _others(self, tree: Tree) -> set[int]:
        return marked(tree, self.spec.get("marks") or [])

    def _stop(self, kill_after: float) -> None:
        """SIGTERM once; all times run from there, and a shorter one wins."""
        if self.term_at is not None:
            self.kill_after = min(self.kill_after, kill_after)
            return
        self.term_at = time.monotonic()
        self.kill_after = kill_after
        if self.copier:
            send_signal(self.copier, signal.SIGKILL)
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> set[int]:
        """Signal whole groups: the kernel does that atomically, a fork cannot slip out."""
        tree = processes()
        me = os.getpid()
        mine = descendants(tree, me) - {self.copier}
        groups = {tree[pid][1] for pid in mine} - {os.getpgid(me), 0}
        for group in groups:
            send_signal(group, number, group=True)
        others = self._others(tree) - mine
        for pid in others:
            send_signal(pid, number)
        return mine | others

    def _kill_all(self) -> None:
        """Again and again, as long as processes turn up that were not there before."""
        killed: set[int] = set()
        while True:
            found = self._signal_all(signal.SIGKILL)
            self._reap()
            if found <= killed:
                return
            killed |= found

    def _clock(self) -> None:
        now = time.monotonic()
        running = self.command and self.exit is None and self.term_at is None
        if running and self.limit_at is not None:
            before = self.limit_at - self.number("pre_stop_before_s")
            if self.spec.get("pre_stop_signal") and not self.warned and now >= before:
                self.warned = True
                self._warn()
            if now >= self.limit_at:
                self.timed_out = True
                self._stop(self.number("kill_after_s"))
        if self.term_at is not None and now >= self.term_at + self.kill_after and not self.freed:
            self.killing = True
            self._kill_all()

    def _warn(self) -> None:
        """Send the signal that was asked for, to processes that catch it: it kills others."""
        number = getattr(signal, str(self.spec["pre_stop_signal"]), None)
        if number is None:
            return
        tree = processes()
        for pid in descendants(tree, os.getpid()) | self._others(tree):
            if catches(pid, number):
                send_signal(pid, number)

    def _wait_ms(self) -> int | None:
        now = time.monotonic()
        at = []
        if self.limit_at is not None and self.exit is None and self.term_at is None:
            early = self.spec.get("pre_stop_signal") and not self.warned
            at.append(self.limit_at - (self.number("pre_stop_before_s") if early else 0))
        if self.term_at is not None and not self.killing:
            at.append(self.term_at + self.kill_after)
        if self.unsaved or self.strangers or self.killing:
            at.append(now + POLL_S)
        # poll() counts milliseconds in an int: a limit of a month would not fit.
        return max(1, int(min(min(at) - now, 3600) * 1000) + 1) if at else None

    # -- files and clients --

    def _save(self) -> None:
        """Write what is not on disk yet, then tell; a full disk is tried again."""
        try:
            for name in list(self.unsaved):
                put(name, self.unsaved[name], sync=name == "exit.json")
                self.saved[name] = self.unsaved.pop(name)
        except FileNotFoundError:
            # The job has deleted its own run directory: its end must be told all the same.
            if restore(self.home, self.spec):
                self.unsaved = {**self.saved, **self.unsaved}
            return
        except OSError:
            return
        for event in self.unsaid:
            for client in self.clients.values():
                client.tell(event)
        self.said += self.unsaid
        self.unsaid = []

    def adopt(self, sock: socket.socket) -> None:
        """Serve one more client, from what has happened already."""
        client = Client(sock)
        self.clients[sock.fileno()] = client
        self.poll.register(sock, select.POLLIN)
        for event in self.said:
            client.tell(event)

    def _ready(self, fd: int, wake: int) -> None:
        if fd == wake:
            os.read(wake, 4096)
        elif fd == self.listener.fileno():
            try:
                self.adopt(self.listener.accept()[0])
            except OSError:
                pass
        else:
            lines = self.clients[fd].lines()
            if lines is None:
                self.poll.unregister(fd)
                self.clients.pop(fd).sock.close()
            for line in lines or ():
                self._order(line)

    def _order(self, line: bytes) -> None:
        try:
            order = json.loads(line)
            kill_after = float(order["kill_after_s"])
            order["stop"]
        except (ValueError, TypeError, KeyError):
            return
        if not self.freed:
            self._stop(min(max(0.0, kill_after), 1e9))
