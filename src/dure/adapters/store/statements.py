"""Statements of the hot path, compiled once for a dialect.

They go to the driver as text with positional values: a batch of hundreds of rows then
costs SQLAlchemy nothing per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Dialect, Table, bindparam, delete, insert, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import ClauseElement

from dure.adapters.store import rows, schema


class Statement:
    """One compiled statement and the order of its values."""

    def __init__(self, made: ClauseElement, names: Sequence[str], dialect: Dialect) -> None:
        compiled = made.compile(dialect=dialect)
        self._text = str(compiled)
        order = getattr(compiled, "positiontup", None)
        if order is None or list(order) != list(names):
            raise AssertionError(f"values would be bound in another order: {order} != {names}")

    def many(self, conn: Connection, values: Sequence[tuple[Any, ...]]) -> int:
        """Run once per row; answer how many rows were touched."""
        if not values:
            return 0
        if len(values) == 1:
            return conn.exec_driver_sql(self._text, values[0]).rowcount
        return conn.exec_driver_sql(self._text, list(values)).rowcount


class Statements:
    """All hot statements for one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        job_columns = rows.JOB_FIXED + rows.JOB_CHANGING
        attempt_columns = rows.ATTEMPT_KEY + rows.ATTEMPT_CHANGING
        lease_columns = ("node", "gpu_index", "job", "epoch")
        self.add_jobs = self._insert(schema.jobs, job_columns)
        # Two updates: SQLite rewrites every index that has a column in the SET list, so
        # the usual one leaves out what only a PATCH changes.
        self.put_jobs_whole = self._update(schema.jobs, job_columns[1:], ("id",))
        self.put_jobs = self._update(schema.jobs, rows.JOB_CHANGING, ("id",))
        self.add_attempts = self._insert(schema.attempts, attempt_columns)
        self.put_attempts = self._update(schema.attempts, rows.ATTEMPT_CHANGING, rows.ATTEMPT_KEY)
        self.take_gpus = self._insert(schema.gpu_leases, lease_columns)
        self.free_gpus = self._delete(schema.gpu_leases, lease_columns)
        self.emit = self._insert(schema.events, rows.EVENT)
        self.put_named = {
            table.name: self._upsert(table, ("name", "body"), ("name",))
            for table in (schema.labs, schema.users, schema.tiers, schema.nodes)
        }
        self.put_token = self._upsert(schema.tokens, ("digest", "user", "body"), ("digest",))
        self.put_replay = self._upsert(
            schema.replays,
            ("user", "key", "fingerprint", "created_ms", "response"),
            ("user", "key"),
        )
        self.put_forecasts = self._upsert(schema.forecasts, rows.FORECAST, rows.FORECAST[:2])
        self.put_fact = self._upsert(schema.facts, ("key", "value"), ("key",))

    def _insert(self, table: Table, columns: Iterable[str]) -> Statement:
        names = tuple(columns)
        made = insert(table).values({name: bindparam(name) for name in names})
        return Statement(made, names, self._dialect)

    def _update(self, table: Table, columns: Iterable[str], key: Iterable[str]) -> Statement:
        names = tuple(columns)
        keys = tuple(f"key_{name}" for name in key)
        made = update(table).values({name: bindparam(name) for name in names})
        for name in key:
            made = made.where(table.c[name] == bindparam(f"key_{name}"))
        return Statement(made, names + keys, self._dialect)

    def _delete(self, table: Table, key: Iterable[str]) -> Statement:
        made = delete(table)
        for name in key:
            made = made.where(table.c[name] == bindparam(name))
        return Statement(made, tuple(key), self._dialect)

    def _upsert(self, table: Table, columns: Iterable[str], key: Iterable[str]) -> Statement:
        names = tuple(columns)
        maker = postgresql.insert if self._dialect.name == "postgresql" else sqlite.insert
        made = maker(table).values({name: bindparam(name) for name in names})
        others = {name: made.excluded[name] for name in names if name not in set(key)}
        made = made.on_conflict_do_update(index_elements=list(key), set_=others)
        return Statement(made, names, self._dialect)
