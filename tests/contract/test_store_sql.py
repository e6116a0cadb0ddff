"""What the SQL stores promise beyond the contract: other processes, crashes, the schema."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

import dure.adapters.store.migrations as history
from dure.adapters.store import engines, schema
from dure.adapters.store.sql import SqlStore
from dure.core.errors import DureError, ErrorCode
from dure.core.model import JobState
from dure.ports import AlreadyBooked, GpuTaken
from tests import postgres
from tests.contract import stores
from tests.contract.stores import Home, attempt, event, job, line


@pytest.fixture(params=stores.SQL_KINDS)
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    with stores.home(request.param, tmp_path) as made:
        yield made


@pytest.fixture(params=stores.SQL_KINDS)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    with stores.home(request.param, tmp_path, empty=True) as made:
        yield made


@pytest.fixture
def store(home: Home) -> SqlStore:
    return home.open()


def fill(store: SqlStore) -> None:
    with store.write() as tx:
        tx.add_jobs([job(tx.next_job_id()), stores.full_job(tx.next_job_id())])
        tx.add_attempts([attempt(1), attempt(2, 4, (0, 1))])
        tx.add_ledger([line(1, to_ms=10**24)])
        tx.put_lab(stores.full_lab())
        tx.put_user(stores.full_user())
        tx.put_tier(stores.full_tier())
        tx.put_node(stores.full_node())
        tx.put_token(stores.full_token())
        tx.put_replay(stores.full_replay("a"))
        tx.emit([stores.full_event(), event()])


def seen(store: SqlStore) -> dict[str, object]:
    with store.read() as reads:
        return stores.everything(reads, 5)


# -- one database, several servers -------------------------------------------------


def test_everything_is_there_after_opening_again(home: Home):
    first = home.open()
    fill(first)
    before = seen(first)
    first.close()
    again = home.open()
    assert seen(again) == before
    with again.write() as tx:
        assert tx.next_job_id() == 3
        tx.emit([event()])
    assert seen(again)["last"] == 3
    with pytest.raises(GpuTaken), again.write() as tx:
        tx.add_attempts([attempt(2, 5, (1,))])
    with pytest.raises(AlreadyBooked), again.write() as tx:
        tx.add_ledger([line(1)])


def test_two_servers_take_turns(home: Home):
    servers = [home.open(), home.open()]
    told: list[list[int]] = [[], []]
    for server, heard in zip(servers, told, strict=True):
        server.subscribe(lambda events, heard=heard: heard.extend(e.id for e in events))

    def work(server: SqlStore) -> None:
        for _ in range(15):
            with server.write() as tx:
                mine = tx.next_job_id()
                tx.add_jobs([job(mine)])
                tx.emit([event(0, mine), event(1, mine)])

    threads = [threading.Thread(target=work, args=(server,)) for server in servers * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with servers[0].read() as reads:
        assert [j.id for j in reads.all_jobs()] == list(range(1, 61))
        events = reads.events()
    assert [e.id for e in events] == list(range(1, 121))
    assert [e.job for e in events] == [i for i in range(1, 61) for _ in range(2)]
    # Each server's subscribers hear of its own commits, in order.
    assert [heard == sorted(heard) for heard in told] == [True, True]
    assert sorted(told[0] + told[1]) == list(range(1, 121))


def test_a_reader_keeps_its_snapshot_while_others_commit(store: SqlStore):
    fill(store)
    with store.read() as reads:
        before = stores.everything(reads, 5)
        with store.write() as tx:
            tx.put_jobs([msgspec.structs.replace(job(1), state=JobState.DEAD)])
            tx.add_jobs([job(3)])
            tx.put_attempts([msgspec.structs.replace(attempt(1), freed_ms=9)])
            tx.emit([event(), event()])
        assert stores.everything(reads, 5) == before
    after = seen(store)
    assert after["last"] == before["last"] + 2
    assert after["jobs"] != before["jobs"]


def test_an_open_transaction_is_unseen_and_blocks_no_reader(store: SqlStore):
    fill(store)
    before = seen(store)
    with store.write() as tx:
        tx.add_jobs([job(3)])
        tx.put_jobs([msgspec.structs.replace(job(1), state=JobState.DEAD)])
        tx.emit([event()])
        assert seen(store) == before
    assert seen(store) != before


WRITER = """
import sys
from dure.adapters.store.sql import SqlStore
from tests.contract.stores import attempt, event, job, line
store = SqlStore(sys.argv[1])
with store.write() as tx:
    tx.next_job_id()
    tx.add_jobs([job(i) for i in range(10, 2000)])
    tx.add_attempts([attempt(i) for i in range(10, 2000)])
    tx.add_ledger([line(10)])
    tx.emit([event(i) for i in range(2000)])
    print("written", flush=True)
    sys.stdin.read()
"""


def test_kill_9_inside_a_transaction_changes_nothing(home: Home):
    store = home.open()
    fill(store)
    before = seen(store)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, home.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        assert seen(store) == before
        writer.kill()
    assert seen(store) == before
    with store.write() as tx:
        assert tx.next_job_id() == 3
        tx.add_jobs([job(3)])
        tx.add_attempts([attempt(3, node="node-10")])
        tx.emit([event()])
    assert seen(store)["last"] == before["last"] + 1


STARTER = """
import sys
from dure.adapters.store.sql import SqlStore
from tests.contract.stores import event
sys.stdin.read()
store = SqlStore(sys.argv[1])
with store.write() as tx:
    tx.emit([event()])
store.close()
"""


def test_servers_may_start_together_on_an_empty_database(empty: Home):
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", STARTER, empty.url],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for one in started:
        assert one.stdin is not None
        one.stdin.close()
        one.stdin = None
    errors = [one.communicate(timeout=60)[1] for one in started]
    assert errors == [""] * 4
    assert [one.returncode for one in started] == [0] * 4
    assert seen(empty.open())["last"] == 4


# -- what goes wrong -------------------------------------------------------------------


def test_a_transaction_that_failed_once_is_never_committed(store: SqlStore):
    fill(store)
    before = seen(store)
    with pytest.raises(DureError, match="STORE_FAILED"), store.write() as tx:
        tx.add_jobs([job(3)])
        with pytest.raises(GpuTaken):
            tx.add_attempts([attempt(3), attempt(3, 2, (0,), node="node-1")])
    with pytest.raises(DureError, match="STORE_FAILED"), store.write() as tx:
        tx.emit([event()])
        with pytest.raises(AlreadyBooked):
            tx.add_ledger([line(7), line(1)])
    with pytest.raises(DureError, match="STORE_FAILED"), store.write() as tx:
        tx.emit([event()])
        with pytest.raises(LookupError):
            tx.put_jobs([job(99)])
    assert seen(store) == before


def test_what_was_never_added_cannot_be_replaced(store: SqlStore):
    fill(store)
    with pytest.raises(LookupError), store.write() as tx:
        tx.put_jobs([job(1), job(3)])
    with pytest.raises(LookupError), store.write() as tx:
        tx.put_attempts([attempt(1), attempt(1, 2)])
    with pytest.raises(DureError, match="STORE_FAILED"), store.write() as tx:
        tx.add_jobs([job(1)])
    with pytest.raises(DureError, match="STORE_FAILED"), store.write() as tx:
        tx.add_attempts([attempt(9)])


def test_a_second_transaction_in_one_thread_is_refused_and_does_not_hang(store: SqlStore):
    with pytest.raises(RuntimeError), store.write(), store.write():
        pass
    with store.write() as tx:
        tx.emit([event()])


def test_waiting_too_long_for_another_server_fails_and_the_next_write_works(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    other = home.open()
    monkeypatch.setattr(engines, "WAIT_MS", 100)
    store = home.open()
    with other.write():
        with pytest.raises(DureError) as failed, store.write():
            pass
        assert failed.value.code is ErrorCode.STORE_FAILED
        assert "lock" in str(failed.value.params["reason"])
        assert seen(store)["last"] == 0
    with store.write() as tx:
        tx.emit([event()])
    assert seen(store)["last"] == 1


@pytest.mark.parametrize("home", ["postgres"], indirect=True)
def test_a_dropped_connection_fails_once_and_is_made_anew(home: Home):
    store = home.open()
    fill(store)
    before = seen(store)
    name = home.url.rpartition("/")[2]
    with pytest.raises(DureError, match="STORE_FAILED"), store.write() as tx:
        tx.emit([event()])
        postgres.cluster().cut(name)
        tx.emit([event()])
    with pytest.raises(DureError, match="STORE_FAILED"), store.write() as tx:
        tx.emit([event()])
        postgres.cluster().cut(name)
    with pytest.raises(DureError, match="STORE_FAILED"), store.read() as reads:
        reads.phase()
        postgres.cluster().cut(name)
        reads.phase()
    assert seen(store) == before
    # Dropped while nobody used them: not noticed at all.
    postgres.cluster().cut(name)
    assert seen(store) == before
    with store.write() as tx:
        tx.emit([event()])
    assert seen(store)["last"] == before["last"] + 1


def test_the_database_itself_refuses_to_change_the_ledger(home: Home):
    store = home.open()
    fill(store)
    before = seen(store)
    statements = ["UPDATE ledger SET gpus = 99", "DELETE FROM ledger WHERE job = 1"]
    if home.kind == "postgres":
        statements.append("TRUNCATE ledger")
    for statement in statements:
        with (
            pytest.raises(DBAPIError, match="ledger lines never change"),
            store._writer.begin() as conn,
        ):
            conn.execute(text(statement))
    assert seen(store) == before


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "mysql://host/db", "nonsense", ""]
)
def test_an_unknown_database_is_refused(url: str):
    with pytest.raises(DureError) as refused:
        SqlStore(url)
    assert refused.value.code is ErrorCode.BAD_SETTING


def test_a_database_that_cannot_be_opened_says_why(tmp_path: Path):
    with pytest.raises(DureError) as failed:
        SqlStore(f"sqlite:///{tmp_path}/missing/dure.db")
    assert failed.value.code is ErrorCode.STORE_FAILED
    (tmp_path / "text.db").write_text("this is no database, " * 100)
    with pytest.raises(DureError, match="not a database"):
        SqlStore(f"sqlite:///{tmp_path}/text.db")
    with pytest.raises(DureError, match="STORE_FAILED"):
        SqlStore("postgresql://nobody@127.0.0.1:1/none")


# -- the schema ------------------------------------------------------------------------


def test_migrations_lead_to_the_declared_tables(home: Home):
    store = home.open()
    with store._writer.begin() as conn:
        found = MigrationContext.configure(conn, opts={"compare_type": True})
        assert compare_metadata(found, schema.metadata) == []


def test_head_is_the_newest_revision():
    scripts = ScriptDirectory(str(Path(history.__file__).parent))
    assert scripts.get_heads() == [schema.HEAD]
    revisions = [script.revision for script in scripts.walk_revisions()]
    assert revisions == sorted(revisions, reverse=True)


def test_a_database_ahead_of_this_release_is_used_as_it_is(home: Home):
    store = home.open()
    fill(store)
    with store._writer.begin() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        conn.execute(text("ALTER TABLE jobs ADD COLUMN later TEXT"))
    assert seen(home.open()) == seen(store)


def test_sqlite_is_durable_and_does_not_block_readers(tmp_path: Path):
    store = SqlStore(f"sqlite:///{tmp_path / 'dure.db'}")
    with store._writer.connect() as conn:
        asked = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        found = [conn.exec_driver_sql(f"PRAGMA {name}").scalar() for name in asked]
    assert found == ["wal", 2, 1, engines.WAIT_MS]
    with (
        pytest.raises(DBAPIError, match="readonly"),
        store._reader.connect() as conn,
    ):
        conn.execute(text("DELETE FROM labs"))
    store.close()
    raw = sqlite3.connect(tmp_path / "dure.db")
    assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    raw.close()


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        (
            "SELECT count(*) FROM jobs WHERE state IN ('A', 'B') AND user = 'u'",
            "jobs_by_state_user",
        ),
        ("SELECT DISTINCT user FROM jobs WHERE state = 'A'", "jobs_by_state_user"),
        ("SELECT * FROM jobs WHERE lab = 'x' ORDER BY id DESC LIMIT 9", "jobs_by_lab"),
        ("SELECT * FROM jobs WHERE name = 'x' ORDER BY id DESC LIMIT 9", "jobs_by_name"),
        ("SELECT * FROM jobs WHERE user = 'x' ORDER BY id DESC LIMIT 9", "jobs_by_user"),
        ("SELECT * FROM attempts WHERE freed_ms IS NULL ORDER BY job, epoch", "attempts_open"),
        ("SELECT * FROM ledger WHERE lab = 'x' AND booked_ms >= 3", "ledger_by_lab"),
        ("SELECT * FROM ledger WHERE job = 3", "sqlite_autoindex_ledger_1"),
        ("SELECT * FROM events WHERE id > 3 AND job = 4 ORDER BY id", "events_by_job"),
    ],
)
def test_questions_are_answered_from_an_index(tmp_path: Path, statement: str, index: str):
    with stores.home("sqlite", tmp_path) as made, made.open()._reader.connect() as conn:
        plan = conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}").fetchall()
    assert index in str(plan)
    assert "TEMP B-TREE" not in str(plan)
