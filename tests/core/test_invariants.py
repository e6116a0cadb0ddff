"""The checker is worth something only if it finds each kind of fault when it is there."""

from __future__ import annotations

import msgspec
import pytest

from dure.core.invariants import World, check_plan, check_world, ids
from dure.core.model import (
    Attempt,
    JobState,
    LedgerEntry,
    LedgerKind,
    Outcome,
    Phase,
    Reservation,
)
from dure.core.plan import Absorb, Dispatch, Plan, Release, ReleaseCause, Reserve, Snapshot
from tests.core import build as b

PLACE = b.place("n1", b.R4090)


def attempt(epoch: int = 1, job: int = 1, **kw: object) -> Attempt:
    kw.setdefault("gpus", (0,))
    kw.setdefault("dispatched_ms", 0)
    return Attempt(
        job=job,
        epoch=epoch,
        lab="BCG",
        placement=PLACE,
        mtflops=82_600,
        vram_gb=24,
        simulated=False,
        **kw,
    )


def ended(epoch: int = 1, job: int = 1, **kw: object) -> Attempt:
    times = {"started_ms": 10, "ended_ms": 100, "freed_ms": 100, "outcome": Outcome.COMPLETED}
    return attempt(epoch, job, **{**times, **kw})


def line(kind: LedgerKind, from_ms: int, to_ms: int, **kw: object) -> LedgerEntry:
    given = {"job": 1, "epoch": 1, "segment": 0, "gpus": 1, "booked_ms": 100, **kw}
    return LedgerEntry(
        kind=kind,
        lab="BCG",
        user="u",
        placement=PLACE,
        from_ms=from_ms,
        to_ms=to_ms,
        mtflops=82_600,
        **given,
    )


GOOD_LINES = (line(LedgerKind.START_UP, 0, 10), line(LedgerKind.RUN, 10, 100))


def world(**kw: object) -> World:
    good = {
        "jobs": (b.job(1, JobState.COMPLETED, epoch=1),),
        "attempts": (ended(),),
        "ledger": GOOD_LINES,
        "labs": (b.lab("BCG", 90 * 82_600 / 1e6, as_of_ms=100),),
        "now_ms": 100,
        "half_life_ms": b.POLICY.half_life_ms,
    }
    return World(**{**good, **kw})


def test_a_sound_world_has_no_violation() -> None:
    assert check_world(world(), {"u": 4}) == []


@pytest.mark.parametrize(
    ("invariant", "broken"),
    [
        ("I1", {"attempts": (ended(), ended(2, 2, dispatched_ms=50))}),
        ("I2", {"jobs": (b.job(1, JobState.RUNNING, epoch=1),)}),
        ("I2", {"attempts": (attempt(),), "ledger": ()}),
        (
            "I2",
            {
                "jobs": (
                    b.job(
                        1,
                        JobState.COMPLETED,
                        epoch=1,
                        reservation=Reservation(placement=PLACE, count=1, since_ms=0, mtflops=1),
                    ),
                )
            },
        ),
        ("I3", {"ledger": GOOD_LINES[1:]}),
        ("I3", {"ledger": (*GOOD_LINES, GOOD_LINES[1])}),
        ("I3", {"ledger": (*GOOD_LINES, line(LedgerKind.RUN, 100, 90, segment=1))}),
        ("I3", {"labs": (b.lab("BCG", 90 * 82_600 / 1e6 * (1 + 1e-6), as_of_ms=100),)}),
        ("I3", {"attempts": (ended(freed_ms=None),)}),
        ("I5", {"jobs": (b.job(1, JobState.COMPLETED, epoch=2),)}),
        ("I5", {"attempts": (ended(), ended(2, dispatched_ms=100, freed_ms=200))}),
    ],
)
def test_each_fault_is_found(invariant: str, broken: dict[str, object]) -> None:
    assert invariant in ids(check_world(world(**broken)))


def test_too_many_slots_are_found() -> None:
    jobs = tuple(b.job(i, JobState.GLOBAL_QUEUE_WAIT) for i in range(1, 6))
    found = check_world(world(jobs=jobs, attempts=(), ledger=(), labs=()), {"u": 4})
    assert ids(found) == ["I6"]


def snapshot(**kw: object) -> Snapshot:
    views = (b.view(1, "A", 2), b.view(2, "B", 1))
    given = {
        "cycle": 1,
        "now_ms": 0,
        "phase": Phase.NORMAL,
        "placements": b.pool([b.R4090], [b.node("n1", (b.R4090, 2))]).views(),
        "candidates": views,
        "head": 1,
        "holders": (),
    }
    return Snapshot(**{**given, **kw})


def plan(*decisions: object) -> Plan:
    return Plan(cycle=1, decisions=decisions, reasons={})


def test_a_sound_plan_has_no_violation() -> None:
    assert check_plan(snapshot(), plan(Dispatch(job=1, placement=PLACE, gpus=(0, 1)))) == []


@pytest.mark.parametrize(
    ("invariant", "decisions"),
    [
        ("I1", [Dispatch(job=1, placement=PLACE, gpus=(0, 7))]),
        (
            "I1",
            [
                Dispatch(job=1, placement=PLACE, gpus=(0, 1)),
                Dispatch(job=2, placement=PLACE, gpus=(1,)),
            ],
        ),
        ("I4", []),  # the head could start and does not
        ("I4", [Dispatch(job=2, placement=PLACE, gpus=(0,))]),  # takes what the head could start on
        ("I4", [Reserve(job=2, placement=PLACE, count=1)]),  # not rank 1
    ],
)
def test_each_bad_plan_is_found(invariant: str, decisions: list[object]) -> None:
    assert invariant in ids(check_plan(snapshot(), plan(*decisions)))


def test_reserved_gpus_that_are_given_away_are_found() -> None:
    held = Reservation(placement=PLACE, count=2, since_ms=0, mtflops=1)
    holder = msgspec.structs.replace(b.view(1, "A", 2), reservation=held)
    made = snapshot(candidates=(holder, b.view(2, "B", 1)), holders=(holder,))
    assert "I4" in ids(check_plan(made, plan(Dispatch(job=2, placement=PLACE, gpus=(0,)))))


def test_work_in_maintenance_is_found() -> None:
    made = snapshot(phase=Phase.DRAINING)
    assert "I7" in ids(check_plan(made, plan(Dispatch(job=1, placement=PLACE, gpus=(0, 1)))))
    assert check_plan(made, plan()) == []


def test_a_dispatch_that_does_not_fit_is_found() -> None:
    made = snapshot(candidates=(b.view(1, "A", 2, floor_gb=48),), head=1)
    assert "I2" in ids(check_plan(made, plan(Dispatch(job=1, placement=PLACE, gpus=(0, 1)))))


def test_absorb_and_release_are_followed() -> None:
    held = Reservation(placement=PLACE, count=1, since_ms=0, mtflops=1)
    holder = msgspec.structs.replace(b.view(1, "A", 3), reservation=held)
    made = snapshot(candidates=(holder, b.view(2, "B", 1)), holders=(holder,))
    assert check_plan(made, plan(Absorb(job=1, placement=PLACE, count=2))) == []
    release = Release(job=1, placement=PLACE, gpus=1, cause=ReleaseCause.LOST_RANK)
    assert "I4" in ids(check_plan(made, plan(release)))  # job 2 could have started then
