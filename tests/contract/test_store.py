"""What every store promises; see `dure.ports.Store`."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from dure.core.forecast import Forecast
from dure.core.model import TERMINAL, JobState, LedgerKind, Phase
from dure.ports import AlreadyBooked, GpuTaken, JobFilter, Store
from tests.contract import stores
from tests.contract.stores import AT_MS, Home, attempt, event, job, line


@pytest.fixture(params=stores.KINDS)
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    with stores.home(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def store(home: Home) -> Store:
    return home.open()


# -- round trips ---------------------------------------------------------------------


def test_values_of_this_suite_leave_no_field_at_its_default():
    full = [
        stores.full_job(1),
        stores.full_request(),
        stores.full_attempt(1, 4),
        stores.full_attempt(1, 4).evidence,
        stores.full_lab(),
        stores.full_user(),
        stores.full_tier(),
        stores.full_node(),
        stores.full_node().gpus[0],
        stores.full_token(),
        stores.full_replay(),
        stores.full_event().view,
    ]
    assert [stores.left_at_default(value) for value in full] == [[]] * len(full)
    assert stores.left_at_default(stores.full_event()) == ["id"]


@pytest.mark.parametrize("state", list(JobState))
def test_a_job_comes_back_as_it_was(store: Store, state: JobState):
    given = stores.full_job(1, state)
    with store.write() as tx:
        tx.add_jobs([given])
        assert tx.job(1) == given
    with store.read() as reads:
        assert reads.job(1) == given
        assert reads.jobs([1, 2]) == {1: given}
        assert list(reads.all_jobs()) == [given]
        assert list(reads.live_jobs()) == ([] if state in TERMINAL else [given])
        assert reads.job(2) is None


def test_a_short_job_and_attempt_come_back_as_they_were(store: Store):
    with store.write() as tx:
        tx.add_jobs([job(1)])
        tx.add_attempts([attempt(1)])
    with store.read() as reads:
        assert reads.job(1) == job(1)
        assert reads.attempt(1, 1) == attempt(1)


def test_put_replaces_the_whole_job_and_raises_its_version(store: Store):
    first = job(1)
    later = stores.full_job(1)
    with store.write() as tx:
        tx.add_jobs([first])
    with store.write() as tx:
        tx.put_jobs([later])
        assert tx.job(1) == msgspec.structs.replace(later, version=8)
    with store.read() as reads:
        assert reads.job(1) == msgspec.structs.replace(later, version=8)
        assert reads.list_jobs(JobFilter(name=later.request.name)) == [reads.job(1)]
        assert reads.list_jobs(JobFilter(name="train")) == []


def test_put_of_a_job_read_in_the_same_transaction_keeps_its_request(store: Store):
    with store.write() as tx:
        tx.add_jobs([stores.full_job(1), job(2)])
    with store.write() as tx:
        read = tx.jobs([1, 2])
        assert list(read) == [1, 2]
        moved = [msgspec.structs.replace(j, state=JobState.CANCELLED) for j in read.values()]
        tx.put_jobs(moved)
        again = msgspec.structs.replace(tx.jobs([1])[1], error="X")
        tx.put_jobs([again])
    with store.read() as reads:
        expected = stores.full_job(1, JobState.CANCELLED)
        assert reads.job(1) == msgspec.structs.replace(expected, error="X", version=9)
        assert list(reads.live_jobs()) == []


def test_an_attempt_comes_back_as_it_was(store: Store):
    given = stores.full_attempt(1, 4)
    held = msgspec.structs.replace(given, freed_ms=None)
    with store.write() as tx:
        tx.add_jobs([stores.full_job(1)])
        tx.add_attempts([held])
        assert tx.attempt(1, 4) == held
    with store.read() as reads:
        assert reads.open_attempts() == [held]
    with store.write() as tx:
        tx.put_attempts([given])
        assert tx.attempt(1, 4) == given
    with store.read() as reads:
        assert reads.attempt(1, 4) == given
        assert reads.attempts(1) == [given]
        assert list(reads.all_attempts()) == [given]
        assert reads.open_attempts() == []
        assert reads.attempt(1, 3) is None


def test_people_and_pool_come_back_sorted_by_name_and_go(store: Store):
    names = ["b", "B", "a", "_", "Z-9", "가"]
    with store.write() as tx:
        for name in names:
            tx.put_lab(stores.full_lab(name, 1.0))
            tx.put_lab(stores.full_lab(name))
            tx.put_user(stores.full_user(name))
            tx.put_tier(stores.full_tier(name))
            tx.put_node(stores.full_node(name))
    with store.read() as reads:
        assert reads.labs() == [stores.full_lab(name) for name in sorted(names)]
        assert reads.users() == [stores.full_user(name) for name in sorted(names)]
        assert reads.tiers() == [stores.full_tier(name) for name in sorted(names)]
        assert reads.nodes() == [stores.full_node(name) for name in sorted(names)]
        assert reads.lab("b") == stores.full_lab("b")
        assert reads.user("b") == stores.full_user("b")
        assert reads.lab("c") is None
        assert reads.user("c") is None
    with store.write() as tx:
        tx.remove_lab("b")
        tx.remove_tier("b")
        tx.remove_node("b")
        tx.remove_lab("never there")
    with store.read() as reads:
        assert [lab.name for lab in reads.labs()] == sorted(set(names) - {"b"})
        assert [tier.name for tier in reads.tiers()] == sorted(set(names) - {"b"})
        assert [node.name for node in reads.nodes()] == sorted(set(names) - {"b"})


def test_tokens(store: Store):
    old = stores.full_token("old")
    new = msgspec.structs.replace(stores.full_token("new"), created_ms=5)
    other = msgspec.structs.replace(stores.full_token("other"), user="bob")
    with store.write() as tx:
        for token in (new, old, other):
            tx.put_token(token)
        tx.put_token(msgspec.structs.replace(old, last_used_ms=77))
    with store.read() as reads:
        assert reads.token("new") == new
        assert reads.token("none") is None
        assert reads.tokens("ann") == [msgspec.structs.replace(old, last_used_ms=77), new]
    with store.write() as tx:
        tx.remove_token("new")
    with store.read() as reads:
        assert [token.digest for token in reads.tokens("ann")] == ["old"]


def test_phase_starts_normal_and_lasts(store: Store):
    with store.write() as tx:
        assert tx.phase() is Phase.NORMAL
        tx.put_phase(Phase.DRAINING)
        assert tx.phase() is Phase.DRAINING
    with store.read() as reads:
        assert reads.phase() is Phase.DRAINING


def test_replays_come_back_and_old_ones_go(store: Store):
    flying = msgspec.structs.replace(stores.full_replay("k2", 2), response=b"")
    with store.write() as tx:
        tx.put_replay(stores.full_replay("k1", 1))
        tx.put_replay(flying)
    with store.read() as reads:
        assert reads.replay("ann", "k1") == stores.full_replay("k1", 1)
        assert reads.replay("ann", "k2") == flying
        assert reads.replay("bob", "k1") is None
    with store.write() as tx:
        tx.put_replay(msgspec.structs.replace(flying, response=b"done"))
        tx.forget_replays(2)
    with store.read() as reads:
        assert reads.replay("ann", "k1") is None
        assert reads.replay("ann", "k2") == msgspec.structs.replace(flying, response=b"done")


# -- questions -----------------------------------------------------------------------


def test_forecasts_come_back_and_are_replaced_by_job_and_entry(store: Store):
    first = Forecast(job=1, entered_ms=5, made_ms=10, p20_ms=20, p50_ms=None, p80_ms=None)
    again = msgspec.structs.replace(first, entered_ms=6, made_ms=30, p50_ms=40, p80_ms=1 << 50)
    with store.write() as tx:
        tx.put_forecasts([first, again])
    with store.write() as tx:
        assert tx.open_forecasts() == [first, again]
        tx.put_forecasts([msgspec.structs.replace(first, started_ms=25, after=9)])
    with store.read() as tx:
        assert tx.open_forecasts() == [again]
        assert tx.forecasts(since_ms=11) == [again]
        assert len(tx.forecasts_of([1, 2])) == 2
        assert tx.forecasts_of([]) == tx.forecasts_of([2]) == []
        assert tx.forecasts(since_ms=0)[0].started_ms == 25


def test_ended_attempts_are_the_newest_in_order_of_their_end(store: Store):
    ends = {1: 50, 2: 30, 3: None, 4: 40}
    with store.write() as tx:
        tx.add_jobs([job(i) for i in ends])
        for i, ended_ms in ends.items():
            tx.add_attempts([attempt(i, 1, gpus=(i,), ended_ms=ended_ms)])
    with store.read() as tx:
        assert [a.job for a in tx.ended_attempts(after_ms=0)] == [2, 4, 1]
        assert [a.job for a in tx.ended_attempts(after_ms=30)] == [4, 1]
        assert [a.job for a in tx.ended_attempts(after_ms=0, limit=2)] == [4, 1]


def test_personal_queue_is_in_the_users_order(store: Store):
    waits = JobState.PERSONAL_QUEUE_WAIT
    with store.write() as tx:
        places = {1: 2.0, 2: -1.5, 3: 0, 4: 2.0, 5: 1e-300}
        tx.add_jobs([job(i, waits, position=at) for i, at in places.items()])
        tx.add_jobs([job(6, waits, user="bob"), job(7, JobState.RUNNING, position=-9)])
    with store.read() as reads:
        assert [j.id for j in reads.personal_queue("ann")] == [2, 3, 5, 1, 4]
        assert [j.id for j in reads.personal_queue("bob")] == [6]
        assert reads.personal_queue("eve") == []
        assert reads.users_with_personal_jobs() == ["ann", "bob"]


def test_slots_and_waiting_are_counted_by_state(store: Store):
    with store.write() as tx:
        tx.add_jobs([job(i, state) for i, state in enumerate(JobState, 1)])
        tx.add_jobs([job(99, JobState.RUNNING, user="bob")])
        assert tx.slots_used("ann") == 5
    with store.read() as reads:
        assert reads.slots_used("ann") == 5
        assert reads.waiting_count("ann") == 3
        assert (reads.slots_used("eve"), reads.waiting_count("eve")) == (0, 0)
        assert [j.id for j in reads.live_jobs()] == [1, 2, 3, 4, 5, 6, 99]


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (JobFilter(), [6, 5, 4, 3, 2, 1]),
        (JobFilter(limit=2), [6, 5]),
        (JobFilter(limit=2, before=5), [4, 3]),
        (JobFilter(limit=0), []),
        (JobFilter(user="bob"), [4, 2]),
        (JobFilter(lab="X"), [6, 3]),
        (JobFilter(name="eval"), [5, 2]),
        (JobFilter(states=(JobState.RUNNING, JobState.DEAD)), [6, 1]),
        (JobFilter(since_ms=AT_MS + 4), [6, 5, 4]),
        (JobFilter(user="ann", states=(JobState.RUNNING,), lab="BCG", name="train"), [1]),
        (JobFilter(user="eve"), []),
    ],
)
def test_list_of_jobs_is_filtered_newest_first(store: Store, wanted: JobFilter, ids: list[int]):
    with store.write() as tx:
        tx.add_jobs(
            [
                job(1, JobState.RUNNING),
                job(2, user="bob", name="eval"),
                job(3, lab="X"),
                job(4, user="bob"),
                job(5, name="eval"),
                job(6, JobState.DEAD, lab="X"),
            ]
        )
    with store.read() as reads:
        assert [j.id for j in reads.list_jobs(wanted)] == ids


def test_long_lists_are_whole_and_in_order(store: Store):
    total = 1203
    with store.write() as tx:
        tx.add_jobs([job(i) for i in range(total, 0, -1)])
        tx.add_attempts([attempt(i) for i in range(total, 0, -1)])
    with store.read() as reads:
        assert [j.id for j in reads.all_jobs()] == list(range(1, total + 1))
        assert [j.id for j in reads.live_jobs()] == list(range(1, total + 1))
        assert [a.job for a in reads.all_attempts()] == list(range(1, total + 1))
        assert [a.job for a in reads.open_attempts()] == list(range(1, total + 1))
        assert list(reads.jobs(range(total, 0, -2))) == list(range(total, 0, -2))


def test_jobs_may_be_written_while_they_are_listed(store: Store):
    with store.write() as tx:
        tx.add_jobs([job(i) for i in range(1, 702)])
    with store.write() as tx:
        for one in tx.live_jobs():
            tx.put_jobs([msgspec.structs.replace(one, state=JobState.CANCELLED)])
    with store.read() as reads:
        assert {j.state for j in reads.all_jobs()} == {JobState.CANCELLED}
        assert {j.version for j in reads.all_jobs()} == {2}


def test_attempts_of_a_job_are_in_order_of_epoch(store: Store):
    with store.write() as tx:
        tx.add_jobs([job(1, epoch=3), job(2, epoch=1)])
        tx.add_attempts([attempt(1, epoch, (epoch,)) for epoch in (3, 1, 2)])
        tx.add_attempts([attempt(2)])
    with store.write() as tx:
        # As an engine asks: the jobs of a batch, then an attempt of each, old ones too.
        tx.jobs([1, 2])
        assert tx.attempt(1, 3) == attempt(1, 3, (3,))
        assert tx.attempt(2, 1) == attempt(2)
        assert tx.attempt(1, 1) == attempt(1, 1, (1,))
        assert tx.attempt(1, 4) is None
        assert [a.epoch for a in tx.attempts(1)] == [1, 2, 3]


def test_ledger_is_in_order_of_booking_and_filtered(store: Store):
    lines = [
        line(2, kind=LedgerKind.RUN),
        line(1, kind=LedgerKind.LOST_TAIL, booked_ms=AT_MS + 50),
        line(1, segment=3, kind=LedgerKind.RESERVED, lab="X"),
    ]
    with store.write() as tx:
        tx.add_ledger(lines[:1])
        tx.add_ledger(lines[1:])
        tx.add_ledger([])
    with store.read() as reads:
        assert reads.ledger() == lines
        assert reads.ledger(lab="X") == lines[2:]
        assert reads.ledger(job=1) == lines[1:]
        assert reads.ledger(since_ms=AT_MS + 50) == lines[1:2]
        assert reads.ledger(lab="BCG", job=1, since_ms=1) == lines[1:2]


def test_costs_are_exact_far_beyond_64_bits(store: Store):
    costs = [2**63 - 1, 2**63, 10**24, 10**24 + 1, 123_456_789_012_345_678_901_234_567]
    with store.write() as tx:
        tx.add_ledger(
            [
                line(0, 0, n, kind=LedgerKind.OPENING, gpus=1, mtflops=1, from_ms=0, to_ms=cost)
                for n, cost in enumerate(costs)
            ]
        )
        tx.add_ledger([line(1, gpus=1, mtflops=2**70, from_ms=-5, to_ms=2**65)])
    with store.read() as reads:
        assert [entry.cost_micro for entry in reads.ledger(job=0)] == costs
        assert all(type(entry.to_ms) is int for entry in reads.ledger())
        assert reads.ledger(job=1)[0].cost_micro == (2**65 + 5) * 2**70


def test_usage_is_kept_to_the_last_bit(store: Store):
    usages = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, 1e22, 2.0**53 + 2, -0.0, math.pi * 1e17]
    usages += [math.nextafter(math.e * 10.0**n, 0) for n in range(-30, 30)]
    with store.write() as tx:
        for n, usage in enumerate(usages):
            tx.put_lab(stores.full_lab(f"{n:03}", usage))
    with store.read() as reads:
        assert [lab.usage_micro.hex() for lab in reads.labs()] == [u.hex() for u in usages]


# -- transactions --------------------------------------------------------------------


class Broken(Exception):  # noqa: N818 - says what is so
    """What goes wrong in the middle of a transaction."""


def test_an_exception_leaves_nothing_behind(store: Store):
    told: list[list[object]] = []
    with store.write() as tx:
        tx.add_jobs([job(tx.next_job_id())])
        tx.emit([event()])
    store.subscribe(told.append)
    with store.read() as reads:
        before = stores.everything(reads, 3)
    with pytest.raises(Broken), store.write() as tx:
        tx.put_jobs([msgspec.structs.replace(tx.job(1), state=JobState.DEAD)])
        assert tx.next_job_id() == 2
        tx.add_jobs([job(2)])
        tx.add_attempts([attempt(2)])
        tx.add_ledger([line(2)])
        tx.put_lab(stores.full_lab())
        tx.put_user(stores.full_user())
        tx.put_tier(stores.full_tier())
        tx.put_node(stores.full_node())
        tx.put_token(stores.full_token())
        tx.put_phase(Phase.ACTIVE)
        tx.put_replay(stores.full_replay("a"))
        tx.emit([event(1), event(2)])
        assert tx.last_event_id() == 3
        raise Broken
    with store.read() as reads:
        assert stores.everything(reads, 3) == before
    assert told == []
    with store.write() as tx:
        assert tx.next_job_id() == 2
        tx.add_jobs([job(2)])
        tx.add_attempts([attempt(2)])
        tx.emit([event(3)])
    assert [[e.id for e in batch] for batch in told] == [[2]]


def test_a_transaction_reads_what_it_has_written(store: Store):
    with store.write() as tx:
        tx.add_jobs([job(1)])
        tx.put_jobs([msgspec.structs.replace(job(1), state=JobState.RUNNING)])
        tx.emit([event(1, 1), event(2)])
        assert tx.slots_used("ann") == 1
        assert [j.state for j in tx.list_jobs(JobFilter())] == [JobState.RUNNING]
        assert [e.id for e in tx.events()] == [1, 2]
        assert tx.last_event_id() == 2


def test_a_gpu_is_leased_once(store: Store):
    with store.write() as tx:
        tx.add_jobs([job(1), job(2), job(3)])
        tx.add_attempts([attempt(1, gpus=(0, 1), node="n"), attempt(2, gpus=(2,), node="n")])
    with pytest.raises(GpuTaken), store.write() as tx:
        tx.emit([event()])
        tx.add_attempts([attempt(3, gpus=(3,), node="n"), attempt(3, 2, (1,), node="n")])
    with store.read() as reads:
        assert [a.job for a in reads.open_attempts()] == [1, 2]
        assert reads.last_event_id() == 0
    ended = attempt(1, gpus=(0, 1), node="n", ended_ms=5)
    with store.write() as tx:
        tx.put_attempts([ended])
    with pytest.raises(GpuTaken), store.write() as tx:
        tx.add_attempts([attempt(3, gpus=(1,), node="n")])
    with store.write() as tx:
        tx.put_attempts([msgspec.structs.replace(ended, freed_ms=6)])
        tx.add_attempts([attempt(3, gpus=(1,), node="n")])
    with store.write() as tx:
        # The old epoch is reported free once more: the new lease stays.
        tx.put_attempts([msgspec.structs.replace(ended, freed_ms=6)])
    with pytest.raises(GpuTaken), store.write() as tx:
        tx.add_attempts([attempt(2, 2, (1,), node="n")])
    with store.read() as reads:
        assert [a.job for a in reads.open_attempts()] == [2, 3]


def test_a_line_is_booked_once(store: Store):
    with store.write() as tx:
        tx.add_ledger([line(1)])
    with pytest.raises(AlreadyBooked), store.write() as tx:
        tx.add_ledger([line(2), line(1, to_ms=AT_MS + 9)])
    with pytest.raises(AlreadyBooked), store.write() as tx:
        tx.add_ledger([line(3), line(3)])
    with store.write() as tx:
        tx.add_ledger([line(1, segment=1), line(1, epoch=2), line(1, kind=LedgerKind.LOST_TAIL)])
    with store.read() as reads:
        assert len(reads.ledger()) == 4
        assert reads.ledger()[0] == line(1)


# -- events --------------------------------------------------------------------------


def test_events_come_back_as_they_were_with_their_numbers(store: Store):
    told: list[object] = []
    store.subscribe(told.extend)
    given = [stores.full_event(1), event(7), event(8, 2)]
    with store.write() as tx:
        tx.emit(given)
        tx.emit([])
        tx.emit([event(9, 1)])
    numbered = [msgspec.structs.replace(e, id=n) for n, e in enumerate([*given, event(9, 1)], 1)]
    assert told == numbered
    with store.read() as reads:
        assert reads.events() == numbered
        assert reads.events(after=2) == numbered[2:]
        assert reads.events(after=1, limit=1) == numbered[1:2]
        assert reads.events(job=1) == [numbered[0], numbered[3]]
        assert reads.events(job=1, after=1) == numbered[3:]
        assert reads.events(limit=0) == []
        assert reads.last_event_id() == 4


def test_eight_writers_number_events_without_a_gap_in_order_of_commit(store: Store):
    told: list[int] = []
    store.subscribe(lambda events: told.extend(e.id for e in events))

    def work(writer: int) -> None:
        for turn in range(12):
            with suppress(Broken), store.write() as tx:
                mine = tx.next_job_id()
                tx.add_jobs([job(mine)])
                tx.emit([event(writer, mine), event(turn, mine)])
                if turn % 4 == 3:
                    raise Broken

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = 8 * 9
    assert told == list(range(1, 2 * kept + 1))
    with store.read() as reads:
        assert [e.id for e in reads.events()] == told
        assert [j.id for j in reads.all_jobs()] == list(range(1, kept + 1))
        by_job = [e.job for e in reads.events()]
    assert by_job == [i for i in range(1, kept + 1) for _ in range(2)]
