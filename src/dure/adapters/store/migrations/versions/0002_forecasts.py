"""Forecasts of starts, and ended attempts by time."""  # noqa: INP001 - alembic loads revisions by file, not by name

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


_ALWAYS = {"job", "entered_ms", "made_ms", "p20_ms"}


def upgrade() -> None:
    """Add a table and two indexes."""
    numbers = [
        sa.Column(name, sa.BigInteger(), nullable=name not in _ALWAYS)
        for name in (
            *("job", "entered_ms", "made_ms", "p20_ms", "p50_ms", "p80_ms"),
            *("after", "started_ms"),
        )
    ]
    op.create_table(
        "forecasts",
        *numbers,
        sa.PrimaryKeyConstraint("job", "entered_ms", name="pk_forecasts"),
        sqlite_with_rowid=False,
    )
    op.create_index("forecasts_by_made", "forecasts", ["made_ms"])
    open_only = sa.text("started_ms IS NULL")
    op.create_index(
        "forecasts_open",
        "forecasts",
        ["job"],
        sqlite_where=open_only,
        postgresql_where=open_only,
    )
    op.create_index("attempts_by_ended", "attempts", ["ended_ms"])
