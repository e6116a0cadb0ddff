"""Connections to the two databases, and what makes their transactions alike.

Writers go one at a time over all processes: SQLite by BEGIN IMMEDIATE, PostgreSQL by an
advisory lock that is the first thing each writing transaction takes. Readers see one
snapshot and never wait.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from dure.core.errors import DureError, ErrorCode

WAIT_MS = 10_000
"""How long a writer waits for its turn before the store counts as failed."""
IDLE_MS = 60_000
"""PostgreSQL ends a writing transaction idle for so long: a server that froze, or that the
network has cut off, must not keep the others from writing."""
WRITERS_LOCK = 0x4475_7265
"""Key of PostgreSQL's advisory lock ("Dure"); such locks belong to one database."""


def parse(url: str) -> URL:
    """The URL of a database that this package knows, with its driver."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise _refused("not a database URL") from error
    kind = parsed.get_backend_name()
    if kind == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if kind != "sqlite":
        raise _refused(f"{kind} is not known; sqlite and postgresql are")
    if parsed.database in (None, "", ":memory:"):
        raise _refused("sqlite needs a file")
    return parsed.set(drivername="sqlite+pysqlite")


def _refused(why: str) -> DureError:
    return DureError(ErrorCode.BAD_SETTING, key="server.database", value=why)


def engines(url: URL) -> tuple[Engine, Engine]:
    """The engine that writes (one connection) and the one that reads."""
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, writes=True), _sqlite(url, writes=False)
    return _postgresql(url, writes=True), _postgresql(url, writes=False)


def _pool(*, writes: bool) -> dict[str, int]:
    # A read may not wait for another to end, so readers have no upper bound of their own:
    # the thread limiter above the store is the bound.
    return {"pool_size": 1, "max_overflow": 0} if writes else {"pool_size": 8, "max_overflow": -1}


def _sqlite(url: URL, *, writes: bool) -> Engine:
    engine = create_engine(
        url,
        connect_args={"check_same_thread": False, "timeout": WAIT_MS / 1000},
        **_pool(writes=writes),
    )

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        # sqlite3 begins transactions late and on its own; here BEGIN is always explicit.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA query_only={'OFF' if writes else 'ON'}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql(url: URL, *, writes: bool) -> Engine:
    # "format", because the hot statements are positional. The ping finds connections that a
    # restart of the server has ended, before anything depends on them.
    engine = create_engine(url, paramstyle="format", pool_pre_ping=True, **_pool(writes=writes))

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        from psycopg import IsolationLevel  # noqa: PLC0415 - an optional dependency
        from psycopg.types.numeric import Int8Dumper  # noqa: PLC0415 - an optional dependency

        # psycopg picks int2, int4 or int8 by each value, and would prepare a batch's
        # statement anew for every mixture of them.
        connection.adapters.register_dumper(int, Int8Dumper)
        if not writes:
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            return
        # READ COMMITTED: a snapshot taken before the lock was granted would be stale.
        connection.isolation_level = IsolationLevel.READ_COMMITTED
        connection.execute(f"SET lock_timeout = {WAIT_MS}")
        connection.execute(f"SET idle_in_transaction_session_timeout = {IDLE_MS}")
        connection.commit()

    if writes:

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITERS_LOCK})")

    return engine


def use_wal(engine: Engine) -> None:
    """Put a SQLite file into WAL mode, where readers and the writer do not block."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while True:
        try:
            mode = _set_wal(engine)
            break
        except DBAPIError as error:
            # SQLite does not wait for this lock, whatever the busy timeout: two servers
            # that start together meet here.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    if mode != "wal":
        raise DureError(
            ErrorCode.STORE_FAILED, reason=f"SQLite cannot use WAL on this file system: {mode}"
        )


def _set_wal(engine: Engine) -> str:
    # Past SQLAlchemy, which would begin a transaction: the mode changes only outside one.
    pragma = "PRAGMA journal_mode=WAL"
    with engine.connect() as conn:
        try:
            return str(conn.connection.cursor().execute(pragma).fetchone()[0])
        except engine.dialect.loaded_dbapi.Error as error:
            raise OperationalError(pragma, None, error) from error


def reason(error: Exception) -> str:
    """The database's own words, on one line."""
    words = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    return " ".join(words.split())
