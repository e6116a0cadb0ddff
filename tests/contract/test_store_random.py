"""The same random operations on the store in memory and on SQLite give the same answers."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dure.core.model import JobState, LedgerKind, Outcome, Phase
from dure.ports import AlreadyBooked, GpuTaken, JobFilter, Store, Writes
from tests.contract import stores
from tests.contract.stores import attempt, event, job, line

USERS = ("ann", "bob")
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SEEDS = st.integers(0, 2**32)


class Rollback(Exception):  # noqa: N818 - says what is asked for
    """Ends a transaction that is not to be kept."""


class SameAnswers(RuleBasedStateMachine):
    """Every rule is one transaction on both stores."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(mkdtemp(prefix="dure-random-"))
        self.jobs = 0
        self.told: tuple[list[object], list[object]] = ([], [])

    @initialize()
    def start(self) -> None:
        self.kept = stores.home("sqlite", self.folder)
        self.pair = (stores.Home("memory", "").open(), self.kept.__enter__().open())
        for store, told in zip(self.pair, self.told, strict=True):
            store.subscribe(told.extend)

    def both(self, change: Callable[[Writes], None], keep: bool = True) -> None:
        """Make one change in both; compare answers inside it, and how it ends."""
        ends = [self.one(store, change, keep) for store in self.pair]
        assert ends[0] == ends[1]
        assert self.told[0] == self.told[1]

    def one(self, store: Store, change: Callable[[Writes], None], keep: bool) -> list[object]:
        """What one store answers in the middle of a change, and how that ends."""
        inside: list[object] = []
        try:
            with store.write() as tx:
                change(tx)
                inside.append(stores.everything(tx, self.jobs + 3))
                if not keep:
                    raise Rollback  # noqa: TRY301 - the transaction's own exit is under test
        except (Rollback, GpuTaken, AlreadyBooked) as end:
            return [*inside, type(end)]
        return [*inside, "kept"]

    @rule(seed=SEEDS, count=st.integers(1, 4), keep=st.booleans(), position=FLOATS)
    def submit(self, seed: int, count: int, keep: bool, position: float) -> None:
        def change(tx: Writes) -> None:
            pick = random.Random(seed)
            made = [
                job(
                    tx.next_job_id(),
                    pick.choice(list(JobState)),
                    user=pick.choice(USERS),
                    lab=pick.choice("XY"),
                    name=pick.choice("ab"),
                    position=position,
                )
                for _ in range(count)
            ]
            tx.add_jobs(made)
            tx.emit([event(1, made[0].id), event(2)])

        self.both(change, keep)
        self.jobs += count if keep else 0

    @rule(seed=SEEDS, keep=st.booleans())
    def move(self, seed: int, keep: bool) -> None:
        def change(tx: Writes) -> None:
            pick = random.Random(seed)
            ids = [pick.randint(1, self.jobs + 1) for _ in range(3)]
            for one in tx.jobs(ids).values():
                request = pick.choice([one.request, stores.full_request()])
                state = pick.choice(list(JobState))
                tx.put_jobs([msgspec.structs.replace(one, state=state, request=request)])
            tx.emit([event(3, i) for i in ids])

        self.both(change, keep)

    @rule(seed=SEEDS, keep=st.booleans())
    def dispatch(self, seed: int, keep: bool) -> None:
        def change(tx: Writes) -> None:
            pick = random.Random(seed)
            for one in tx.jobs([pick.randint(1, self.jobs + 1) for _ in range(2)]).values():
                gpus = tuple(pick.sample(range(4), pick.randint(1, 2)))
                later = msgspec.structs.replace(one, epoch=one.epoch + 1)
                tx.put_jobs([later])
                tx.add_attempts([attempt(one.id, later.epoch, gpus, node=pick.choice("nm"))])

        self.both(change, keep)

    @rule(seed=SEEDS, keep=st.booleans(), free=st.booleans())
    def report(self, seed: int, keep: bool, free: bool) -> None:
        def change(tx: Writes) -> None:
            pick = random.Random(seed)
            for one in tx.open_attempts():
                if pick.random() < 0.5:
                    outcome = pick.choice([None, *Outcome])
                    freed_ms = 9 if free else None
                    tx.put_attempts(
                        [msgspec.structs.replace(one, outcome=outcome, freed_ms=freed_ms)]
                    )

        self.both(change, keep)

    @rule(seed=SEEDS, keep=st.booleans(), cost=st.integers(0, 10**24))
    def book(self, seed: int, keep: bool, cost: int) -> None:
        def change(tx: Writes) -> None:
            pick = random.Random(seed)
            kinds = pick.sample(list(LedgerKind), 2)
            tx.add_ledger(
                [line(pick.randint(1, 3), kind=kind, to_ms=cost, lab="X") for kind in kinds]
            )

        self.both(change, keep)

    @rule(name=st.sampled_from("abc"), keep=st.booleans(), usage=FLOATS, remove=st.booleans())
    def settle(self, name: str, keep: bool, usage: float, remove: bool) -> None:
        def change(tx: Writes) -> None:
            tx.put_lab(stores.full_lab(name, usage))
            tx.put_user(stores.full_user(name))
            tx.put_tier(stores.full_tier(name))
            tx.put_node(stores.full_node(name))
            tx.put_token(stores.full_token(name))
            if remove:
                tx.remove_lab(name)
                tx.remove_tier(name)
                tx.remove_node(name)
                tx.remove_token(name)

        self.both(change, keep)

    @rule(
        phase=st.sampled_from(Phase),
        key=st.sampled_from("ab"),
        at_ms=st.integers(0, 9),
        body=st.binary(max_size=9),
        keep=st.booleans(),
    )
    def remember(self, phase: Phase, key: str, at_ms: int, body: bytes, keep: bool) -> None:
        def change(tx: Writes) -> None:
            tx.put_phase(phase)
            given = stores.full_replay(key, at_ms)
            tx.forget_replays(at_ms)
            tx.put_replay(msgspec.structs.replace(given, response=body))

        self.both(change, keep)

    @rule(
        wanted=st.builds(
            JobFilter,
            states=st.lists(st.sampled_from(JobState), max_size=3).map(tuple),
            user=st.sampled_from([None, *USERS]),
            lab=st.sampled_from([None, "X", "Y"]),
            name=st.sampled_from(["", "a", "b"]),
            before=st.none() | st.integers(0, 20),
            limit=st.integers(0, 5),
        ),
        after=st.integers(0, 20),
        number=st.integers(1, 20),
    )
    def ask(self, wanted: JobFilter, after: int, number: int) -> None:
        answers = []
        for store in self.pair:
            with store.read() as reads:
                listed = reads.list_jobs(wanted)
                events = reads.events(after=after, job=number, limit=3)
                lines = reads.ledger(lab=wanted.lab, job=number)
                answers.append((listed, events, lines))
        assert answers[0] == answers[1]

    @invariant()
    def same_answers(self) -> None:
        answers = []
        for store in self.pair:
            with store.read() as reads:
                answers.append(stores.everything(reads, self.jobs + 3))
        assert answers[0] == answers[1]

    def teardown(self) -> None:
        self.kept.__exit__(None, None, None)
        shutil.rmtree(self.folder)


TestSameAnswers = SameAnswers.TestCase
TestSameAnswers.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
