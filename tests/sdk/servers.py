"""A real MLflow server, and a door before it that can be shut in every way servers fail."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class MlflowServer:
    """`mlflow server` on SQLite, in a folder of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dure-mlflow-"))
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        # A client of another version is tested against the server of .venv-track.
        python = os.environ.get("DURE_TEST_MLFLOW_PYTHON", sys.executable)
        argv = [
            *(python, "-m", "mlflow", "server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"),
            *("--artifacts-destination", str(self.folder / "artifacts")),
        ]
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen(
            argv, env=env, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait(self, limit_s: float = 100) -> None:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(self.uri + "/health", timeout=2):
                    return
            except OSError:
                assert self.process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.2)
        raise AssertionError((self.folder / "log").read_text())

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Door:
    """A TCP proxy. `mode`: open, refused, silent, or busy (503 for everything)."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.mode = "open"
        self.requests = 0
        self._closed = False
        self._pairs: set[socket.socket] = set()
        self._listener = self._listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _listen(self) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        return listener

    def turn(self, mode: str) -> None:
        """Change the mode and cut what is open, as a server that dies would."""
        self.mode = mode
        if mode == "refused":
            self._listener.close()
        elif self._listener.fileno() < 0:
            self._listener = self._listen()
        if mode != "open":
            for conn in list(self._pairs):
                with_shutdown(conn)

    def close(self) -> None:
        self._closed = True
        self.turn("refused")

    def _serve(self) -> None:
        while not self._closed:
            try:
                if not select.select([self._listener], [], [], 0.05)[0]:
                    continue
                conn, _ = self._listener.accept()
            except (OSError, ValueError):
                time.sleep(0.02)
                continue
            threading.Thread(target=self._talk, args=(conn,), daemon=True).start()

    def _talk(self, conn: socket.socket) -> None:
        self.requests += 1
        self._pairs.add(conn)
        try:
            if self.mode == "open":
                self._pump(conn)
            elif self.mode == "busy":
                self._refuse(conn)
            else:
                while self.mode == "silent" and not self._closed:
                    time.sleep(0.05)
        except OSError:
            pass
        finally:
            self._pairs.discard(conn)
            conn.close()

    def _refuse(self, conn: socket.socket) -> None:
        conn.recv(1 << 20)
        conn.sendall(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )

    def _pump(self, conn: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self.target)) as up:
            self._pairs.add(up)
            try:
                while True:
                    for ready in select.select([conn, up], [], [], 1)[0]:
                        data = ready.recv(1 << 16)
                        if not data:
                            return
                        (up if ready is conn else conn).sendall(data)
            finally:
                self._pairs.discard(up)


def with_shutdown(conn: socket.socket) -> None:
    with contextlib.suppress(OSError):
        conn.shutdown(socket.SHUT_RDWR)
