"""The first schema."""  # noqa: INP001 - alembic loads revisions by file, not by name

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_EXACT_INT = sa.Numeric().with_variant(sa.Text(), "sqlite")


def _number(name: str, *, null: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=null)


def _text(name: str, *, null: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=null)


def upgrade() -> None:
    """Create everything; the ledger's lines are protected from change."""
    _jobs()
    _attempts()
    _ledger()
    _events()
    _names_and_facts()
    if op.get_bind().dialect.name == "postgresql":
        _protect_ledger_postgresql()
    else:
        _protect_ledger_sqlite()


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", _ROW_ID, autoincrement=False, nullable=False),
        *(_text(name) for name in ("user", "lab", "name")),
        _number("submitted_ms"),
        _text("request"),
        _text("state"),
        sa.Column("position", sa.Double(), nullable=False),
        *(_number(name) for name in ("entered_ms", "eligible_ms", "epoch", "version")),
        sa.Column("held", sa.Boolean(), nullable=False),
        _number("num_gpus"),
        _text("reserved_node", null=True),
        _text("reserved_tier", null=True),
        _number("reserved_count", null=True),
        _number("reserved_since_ms", null=True),
        _number("reserved_mtflops", null=True),
        _number("array_id", null=True),
        _number("array_index", null=True),
        _text("after"),
        _text("life"),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("jobs_by_state_user", "jobs", ["state", "user"])
    op.create_index("jobs_by_user", "jobs", ["user", "id"])
    op.create_index("jobs_by_lab", "jobs", ["lab", "id"])
    op.create_index("jobs_by_name", "jobs", ["name", "id"])


def _attempts() -> None:
    op.create_table(
        "attempts",
        _number("job"),
        _number("epoch"),
        _text("node"),
        _text("tier"),
        _number("dispatched_ms"),
        *(_number(name, null=True) for name in ("started_ms", "ended_ms", "freed_ms")),
        _text("outcome", null=True),
        _text("body"),
        sa.PrimaryKeyConstraint("job", "epoch", name="pk_attempts"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_attempts_jobs"),
        sqlite_with_rowid=False,
    )
    open_only = sa.text("freed_ms IS NULL")
    op.create_index(
        "attempts_open",
        "attempts",
        ["job", "epoch"],
        sqlite_where=open_only,
        postgresql_where=open_only,
    )
    op.create_table(
        "gpu_leases",
        _text("node"),
        *(_number(name) for name in ("gpu_index", "job", "epoch")),
        sa.PrimaryKeyConstraint("node", "gpu_index", name="pk_gpu_leases"),
        sqlite_with_rowid=False,
    )


def _ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("id", _ROW_ID, autoincrement=True, nullable=False),
        _number("job"),
        _number("epoch"),
        _text("kind"),
        _number("segment"),
        *(_text(name) for name in ("lab", "user", "node", "tier")),
        _number("gpus"),
        *(sa.Column(name, _EXACT_INT, nullable=False) for name in ("from_ms", "to_ms", "mtflops")),
        _number("booked_ms"),
        sa.PrimaryKeyConstraint("id", name="pk_ledger"),
        sa.UniqueConstraint("job", "epoch", "kind", "segment", name="uq_ledger"),
    )
    op.create_index("ledger_by_lab", "ledger", ["lab", "booked_ms"])
    op.create_index("ledger_by_booked", "ledger", ["booked_ms"])


def _events() -> None:
    op.create_table(
        "events",
        sa.Column("id", _ROW_ID, autoincrement=False, nullable=False),
        _number("at_ms"),
        _text("name"),
        _number("job", null=True),
        _number("epoch"),
        *(_text(name, null=True) for name in ("lab", "user", "node")),
        _text("actor"),
        _text("body"),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
    )
    op.create_index("events_by_job", "events", ["job", "id"])


def _names_and_facts() -> None:
    for table in ("labs", "users", "tiers", "nodes"):
        op.create_table(
            table,
            _text("name"),
            _text("body"),
            sa.PrimaryKeyConstraint("name", name=f"pk_{table}"),
        )
    op.create_table(
        "tokens",
        *(_text(name) for name in ("digest", "user", "body")),
        sa.PrimaryKeyConstraint("digest", name="pk_tokens"),
    )
    op.create_index("tokens_by_user", "tokens", ["user"])
    op.create_table(
        "replays",
        *(_text(name) for name in ("user", "key", "fingerprint")),
        _number("created_ms"),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("user", "key", name="pk_replays"),
    )
    op.create_index("replays_by_created", "replays", ["created_ms"])
    op.create_table(
        "facts",
        _text("key"),
        _text("value"),
        sa.PrimaryKeyConstraint("key", name="pk_facts"),
    )


def _protect_ledger_sqlite() -> None:
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER ledger_no_{change.lower()} BEFORE {change} ON ledger "
            "BEGIN SELECT RAISE(ABORT, 'ledger lines never change'); END"
        )


def _protect_ledger_postgresql() -> None:
    op.execute(
        "CREATE FUNCTION ledger_lines_never_change() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'ledger lines never change'; END $$"
    )
    op.execute(
        "CREATE TRIGGER ledger_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger "
        "FOR EACH STATEMENT EXECUTE FUNCTION ledger_lines_never_change()"
    )
