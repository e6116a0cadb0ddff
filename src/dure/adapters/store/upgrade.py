"""Bring a database's schema to the newest revision when a store opens."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection, inspect

from dure.adapters.store.schema import HEAD

_alembic = threading.Lock()
"""alembic keeps the run in progress in a global of its process."""


def upgrade(conn: Connection) -> None:
    """Run the missing revisions inside `conn`'s transaction, which holds the writers' lock.

    A database ahead of this release is left alone: schemas only expand, so that an old
    server may start again while the others have been replaced already.
    """
    current = _revision(conn)
    if current is not None and current >= HEAD:
        return
    # alembic costs a tenth of a second, and most starts need none of it.
    from alembic import command  # noqa: PLC0415 - see above
    from alembic.config import Config  # noqa: PLC0415 - see above

    config = Config()
    # As a path, because a package's own name may be taken by another checkout; `%` is
    # alembic's interpolation sign.
    here = str(Path(__file__).parent / "migrations").replace("%", "%%")
    config.set_main_option("script_location", here)
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = conn
    with _alembic:
        command.upgrade(config, "head")


def _revision(conn: Connection) -> str | None:
    if not inspect(conn).has_table("alembic_version"):
        return None
    found = conn.exec_driver_sql("SELECT max(version_num) FROM alembic_version").scalar()
    return None if found is None else str(found)
