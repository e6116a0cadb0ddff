"""Who is connected to a supervisor: they are told events, and may ask for a stop.

Rule: standard library only, syntax of Python 3.9, few imports: they cost time in each job.
"""
# ruff: noqa: SIM105 - contextlib costs time at each start

from __future__ import annotations

import json
import os
import select
import signal
import socket

LINE_LIMIT = 65_536


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


class Audience:
    """All connections, and the one poll of the supervisor."""

    def __init__(self, listener: socket.socket) -> None:
        self.poll = select.poll()
        self._listener = listener
        self.poll.register(listener, select.POLLIN)
        self._clients: dict[int, Client] = {}
        self._said: list[str] = []
        self._wake = self._wake_on_child()

    def _wake_on_child(self) -> int:
        out, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        self.poll.register(out, select.POLLIN)
        return out

    def adopt(self, sock: socket.socket) -> None:
        """Serve one more client, from what has happened already."""
        client = Client(sock)
        self._clients[sock.fileno()] = client
        self.poll.register(sock, select.POLLIN)
        for event in self._said:
            client.tell(event)

    def tell(self, events: list[str]) -> None:
        """Tell everybody, also those who come later."""
        for event in events:
            for client in self._clients.values():
                client.tell(event)
        self._said += events

    def wait(self, wait_ms: int | None) -> list[float]:
        """Wait for anything; times of SIGKILL, in seconds, of the stops that were asked."""
        asked: list[float] = []
        for fd, _ in self.poll.poll(wait_ms):
            if fd == self._wake:
                os.read(fd, 4096)
            elif fd == self._listener.fileno():
                try:
                    self.adopt(self._listener.accept()[0])
                except OSError:
                    pass
            elif fd in self._clients:  # what others registered they read themselves
                asked += self._orders(fd)
        return asked

    def _orders(self, fd: int) -> list[float]:
        lines = self._clients[fd].lines()
        if lines is None:
            self.poll.unregister(fd)
            self._clients.pop(fd).sock.close()
        found = []
        for line in lines or ():
            try:
                order = json.loads(line)
                kill_after = float(order["kill_after_s"])
                order["stop"]
            except (ValueError, TypeError, KeyError):
                continue
            found.append(min(max(0.0, kill_after), 1e9))
        return found
