"""Tables of the SQL stores, the same on SQLite and PostgreSQL.

Rule: expand only. A migration adds; it never drops or renames what the release before it
reads, so that two releases can run on one database while servers are replaced.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.types import TypeDecorator, TypeEngine

HEAD = "0002"
"""Newest revision under `migrations/versions`; revisions sort as text."""


class ExactInt(TypeDecorator[int]):
    """An integer of any size: TEXT in SQLite, NUMERIC in PostgreSQL.

    A line that takes over old use holds a charge of up to 1e24, and 64 bits end at 9e18.
    """

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Numeric() if dialect.name == "postgresql" else Text())

    def process_bind_param(self, value: int | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        # Decimal(int) is exact whatever the decimal context's precision is.
        return Decimal(value) if dialect.name == "postgresql" else str(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:  # noqa: ARG002 - SQLAlchemy's signature
        return None if value is None else int(value)


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
    }
)

# Only an INTEGER primary key is SQLite's rowid; BIGINT would be a second index.
_ROW_ID = BigInteger().with_variant(Integer(), "sqlite")

jobs = Table(
    "jobs",
    metadata,
    Column("id", _ROW_ID, primary_key=True, autoincrement=False),
    Column("user", Text, nullable=False),
    Column("lab", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("submitted_ms", BigInteger, nullable=False),
    Column("request", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("position", Double, nullable=False),
    Column("entered_ms", BigInteger, nullable=False),
    Column("eligible_ms", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("held", Boolean, nullable=False),
    Column("num_gpus", BigInteger, nullable=False),
    Column("reserved_node", Text),
    Column("reserved_tier", Text),
    Column("reserved_count", BigInteger),
    Column("reserved_since_ms", BigInteger),
    Column("reserved_mtflops", BigInteger),
    Column("array_id", BigInteger),
    Column("array_index", BigInteger),
    Column("after", Text, nullable=False),
    Column("life", Text, nullable=False),
    Index("jobs_by_state_user", "state", "user"),
    Index("jobs_by_user", "user", "id"),
    Index("jobs_by_lab", "lab", "id"),
    Index("jobs_by_name", "name", "id"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("job", BigInteger, ForeignKey("jobs.id"), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("node", Text, nullable=False),
    Column("tier", Text, nullable=False),
    Column("dispatched_ms", BigInteger, nullable=False),
    Column("started_ms", BigInteger),
    Column("ended_ms", BigInteger),
    Column("freed_ms", BigInteger),
    Column("outcome", Text),
    Column("body", Text, nullable=False),
    PrimaryKeyConstraint("job", "epoch"),
    Index(
        "attempts_open",
        "job",
        "epoch",
        sqlite_where=text("freed_ms IS NULL"),
        postgresql_where=text("freed_ms IS NULL"),
    ),
    Index("attempts_by_ended", "ended_ms"),
    sqlite_with_rowid=False,
)

gpu_leases = Table(
    "gpu_leases",
    metadata,
    Column("node", Text, nullable=False),
    Column("gpu_index", BigInteger, nullable=False),
    Column("job", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    PrimaryKeyConstraint("node", "gpu_index"),
    sqlite_with_rowid=False,
)

ledger = Table(
    "ledger",
    metadata,
    Column("id", _ROW_ID, primary_key=True, autoincrement=True),
    Column("job", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("segment", BigInteger, nullable=False),
    Column("lab", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("tier", Text, nullable=False),
    Column("gpus", BigInteger, nullable=False),
    Column("from_ms", ExactInt, nullable=False),
    Column("to_ms", ExactInt, nullable=False),
    Column("mtflops", ExactInt, nullable=False),
    Column("booked_ms", BigInteger, nullable=False),
    UniqueConstraint("job", "epoch", "kind", "segment"),
    Index("ledger_by_lab", "lab", "booked_ms"),
    Index("ledger_by_booked", "booked_ms"),
)

events = Table(
    "events",
    metadata,
    Column("id", _ROW_ID, primary_key=True, autoincrement=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("name", Text, nullable=False),
    Column("job", BigInteger),
    Column("epoch", BigInteger, nullable=False),
    Column("lab", Text),
    Column("user", Text),
    Column("node", Text),
    Column("actor", Text, nullable=False),
    Column("body", Text, nullable=False),
    Index("events_by_job", "job", "id"),
)


def _named(table: str) -> Table:
    """A small table of values that are only ever looked up by name."""
    return Table(
        table,
        metadata,
        Column("name", Text, nullable=False),
        Column("body", Text, nullable=False),
        PrimaryKeyConstraint("name"),
    )


labs = _named("labs")
users = _named("users")
tiers = _named("tiers")
nodes = _named("nodes")

tokens = Table(
    "tokens",
    metadata,
    Column("digest", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("body", Text, nullable=False),
    PrimaryKeyConstraint("digest"),
    Index("tokens_by_user", "user"),
)

replays = Table(
    "replays",
    metadata,
    Column("user", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("response", LargeBinary, nullable=False),
    PrimaryKeyConstraint("user", "key"),
    Index("replays_by_created", "created_ms"),
)

forecasts = Table(
    "forecasts",
    metadata,
    Column("job", BigInteger, nullable=False),
    Column("entered_ms", BigInteger, nullable=False),
    Column("made_ms", BigInteger, nullable=False),
    Column("p20_ms", BigInteger, nullable=False),
    Column("p50_ms", BigInteger),
    Column("p80_ms", BigInteger),
    Column("after", BigInteger),
    Column("started_ms", BigInteger),
    PrimaryKeyConstraint("job", "entered_ms"),
    Index("forecasts_by_made", "made_ms"),
    Index(
        "forecasts_open",
        "job",
        sqlite_where=text("started_ms IS NULL"),
        postgresql_where=text("started_ms IS NULL"),
    ),
    sqlite_with_rowid=False,
)

facts = Table(
    "facts",
    metadata,
    Column("key", Text, nullable=False),
    Column("value", Text, nullable=False),
    PrimaryKeyConstraint("key"),
)
"""Single values: `job_id` and `event_id` are the last numbers given, `phase` the phase."""
