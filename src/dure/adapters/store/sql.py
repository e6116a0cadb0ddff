"""The store in SQLite or PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError

from dure.adapters.store.engines import engines, parse, reason, use_wal
from dure.adapters.store.reading import ReadTx
from dure.adapters.store.statements import Statements
from dure.adapters.store.upgrade import upgrade
from dure.adapters.store.writing import WriteTx
from dure.core.errors import DureError, ErrorCode
from dure.core.events import Event
from dure.ports import Reads, Writes


class SqlStore:
    """A `Store` in a database; opening it brings the schema up to date.

    Every database error leaves as STORE_FAILED and ends its transaction; the next one
    connects anew. When the connection breaks during COMMIT nobody can know here whether it
    was kept: the caller sees STORE_FAILED, and finds out from the event ids.
    """

    def __init__(self, url: str) -> None:
        parsed = parse(url)
        self._writer, self._reader = engines(parsed)
        self._statements = Statements(self._writer.dialect)
        self._turn = threading.Lock()
        self._owner: int | None = None
        self._tell: list[Callable[[list[Event]], None]] = []
        try:
            with _surfaced():
                if parsed.get_backend_name() == "sqlite":
                    use_wal(self._writer)
                with self._writer.begin() as conn:
                    upgrade(conn)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def read(self) -> Iterator[Reads]:
        """One snapshot, taken at the first question; it never waits for a writer."""
        with _surfaced(), self._reader.connect() as conn:
            yield ReadTx(conn)

    @contextmanager
    def write(self) -> Iterator[Writes]:
        """One transaction; after COMMIT the subscribers hear of it before the next begins."""
        with self._my_turn(), _surfaced():
            with self._writer.begin() as conn:
                tx = WriteTx(conn, self._statements)
                yield tx
                if tx.spoiled:
                    # The caller went on after a refusal that had left half a batch behind.
                    raise DureError(ErrorCode.STORE_FAILED, reason=tx.spoiled)
                tx.finish()
            if tx.emitted:
                for tell in self._tell:
                    tell(tx.emitted)

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        me = threading.get_ident()
        if self._owner == me:
            raise RuntimeError("this thread has a writing transaction open already")
        with self._turn:
            self._owner = me
            try:
                yield
            finally:
                self._owner = None

    def subscribe(self, tell: Callable[[list[Event]], None]) -> None:
        """Call `tell` with the events of each commit made here, in commit order."""
        self._tell.append(tell)

    def close(self) -> None:
        """Close all connections."""
        self._reader.dispose()
        self._writer.dispose()


@contextmanager
def _surfaced() -> Iterator[None]:
    """Let no SQLAlchemy exception out of this package."""
    try:
        yield
    except SQLAlchemyError as error:
        raise DureError(ErrorCode.STORE_FAILED, reason=reason(error)) from error
