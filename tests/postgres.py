"""A throw-away PostgreSQL cluster for one test session, and a fresh database per test.

The binaries are the distribution's (`apt install postgresql`). Nothing is shared with a
cluster that may run on the machine: own folder, own socket, own loopback port.
"""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from functools import cache
from itertools import count
from pathlib import Path

import psycopg

MISSING = "PostgreSQL's server programs are missing: apt install postgresql"


class PostgresMissing(Exception):  # noqa: N818 - says what is so
    """The server programs are not installed."""


def binaries() -> Path | None:
    """Folder of initdb and postgres, newest release first."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    debian = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = sorted(debian, key=lambda path: int(path.parts[-3]), reverse=True)
    return newest[0].parent if newest else None


class Cluster:
    """A running server; `stop` removes it without a trace."""

    def __init__(self) -> None:
        programs = binaries()
        if programs is None:
            raise PostgresMissing(MISSING)
        self._names = count(1)
        self._home = Path(tempfile.mkdtemp(prefix="dure-postgres-"))
        self._as = _unprivileged()
        self._server: subprocess.Popen[bytes] | None = None
        self._admin: psycopg.Connection | None = None
        try:
            if self._as is not None:
                os.chown(self._home, self._as.pw_uid, self._as.pw_gid)
            self._initdb(programs)
            self.port = _free_port()
            self._server = self._start(programs)
            self._admin = self._connect()
        except BaseException:
            self.stop()
            raise

    @property
    def _data(self) -> Path:
        return self._home / "data"

    def _initdb(self, programs: Path) -> None:
        flags = ["-U", "dure", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]
        done = subprocess.run(
            [*self._prefix(), programs / "initdb", "-D", self._data, *flags],
            capture_output=True,
            text=True,
            check=False,
            cwd=self._home,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)

    def _start(self, programs: Path) -> subprocess.Popen[bytes]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self._home,
            "fsync": "off",
            "full_page_writes": "off",
            "synchronous_commit": "off",
            "shared_buffers": "32MB",
            "max_connections": 60,
            "autovacuum": "off",
            # A copied template need not be checkpointed, which is most of its time.
            "max_wal_size": "4GB",
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        with (self._home / "log").open("wb") as log:
            return subprocess.Popen(
                [*self._prefix(), programs / "postgres", "-D", self._data, *options],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self._home,
            )

    def _prefix(self) -> list[str]:
        """Give up root, and end with the test process even if that is killed."""
        become = [] if self._as is None else [f"--reuid={self._as.pw_uid}"]
        become += [] if self._as is None else [f"--regid={self._as.pw_gid}", "--clear-groups"]
        return ["setpriv", *become, "--pdeathsig=QUIT", "--"]

    def _connect(self) -> psycopg.Connection:
        deadline = time.monotonic() + 60
        while True:
            try:
                return psycopg.connect(
                    host=str(self._home),
                    port=self.port,
                    user="dure",
                    dbname="postgres",
                    autocommit=True,
                )
            except psycopg.OperationalError:
                if self._server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._home / "log").read_text()) from None
                time.sleep(0.05)

    def database(self, template: str = "template0") -> str:
        """Name of a fresh database, empty or a copy of `template`."""
        name = f"t{next(self._names)}"
        self._admin.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop(self, name: str) -> None:
        """Remove a database and whoever is still connected to it."""
        self._admin.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def cut(self, name: str) -> None:
        """End all connections to a database, as a restart of the server would."""
        self._admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s",
            (name,),
        )

    def url(self, name: str) -> str:
        """SQLAlchemy's URL of a database."""
        return f"postgresql+psycopg://dure@127.0.0.1:{self.port}/{name}"

    def stop(self) -> None:
        """End the server at once and delete its folder."""
        if self._admin is not None:
            self._admin.close()
        if self._server is not None:
            self._server.send_signal(signal.SIGQUIT)
            self._server.wait()
        shutil.rmtree(self._home, ignore_errors=True)


def _unprivileged() -> pwd.struct_passwd | None:
    """initdb refuses root; the package's own user, or nobody, stands in."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("no unprivileged user to run PostgreSQL as")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@cache
def cluster() -> Cluster:
    """The session's cluster, started at the first call and stopped at exit."""
    started = Cluster()
    atexit.register(started.stop)
    return started
