"""Costs to the digit, decay that neither drifts nor dies, and the order it makes (P-6 to P-8)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.core.errors import DureError
from dure.core.fairshare import ZERO_KEY, book, check_weight, decayed_micro, order_key
from dure.core.model import Lab, LedgerEntry, LedgerKind, Limits
from dure.core.policy import DAY_MS
from tests.core import build as b

HALF = 7.0 * DAY_MS
YEAR = 365 * DAY_MS


def line(gpus: int, ms: int, mtflops: int, kind: LedgerKind = LedgerKind.RUN) -> LedgerEntry:
    place = b.place("n", b.R4090)
    return LedgerEntry(
        job=1, epoch=1, kind=kind, segment=0, lab="A", user="u", placement=place,
        gpus=gpus, from_ms=0, to_ms=ms, mtflops=mtflops, booked_ms=0,
    )  # fmt: skip


def test_one_gpu_an_hour_costs_297360_exactly() -> None:
    assert line(1, 3_600_000, 82_600).cost_micro == 297_360 * 10**6


def test_two_gpus_half_an_hour_and_a_reservation_of_ten_minutes_cost_346920() -> None:
    run, held = line(2, 1_800_000, 82_600), line(1, 600_000, 82_600, LedgerKind.RESERVED)
    assert run.cost_micro + held.cost_micro == 346_920 * 10**6


@pytest.mark.parametrize("kind", [k for k in LedgerKind if k.value in ("start_up", "lost_tail")])
def test_what_is_written_off_costs_nothing(kind) -> None:
    assert line(8, 10**9, 82_600, kind).cost_micro == 0


@pytest.mark.parametrize("steps", [1, 3, 10_000])
def test_three_half_lives_are_an_eighth_however_many_steps_they_take(steps: int) -> None:
    """S1: decay is one power of the whole span."""
    lab = Lab(name="A", usage_micro=8e12, as_of_ms=0)
    span = 3 * HALF
    for i in range(1, steps + 1):
        at = round(span * i / steps)
        lab = Lab(name="A", usage_micro=decayed_micro(lab, at, HALF), as_of_ms=at)
    assert lab.usage_micro == pytest.approx(1e12, rel=1e-9)


@pytest.mark.parametrize("steps", [1, 3, 10_000])
def test_a_cost_booked_in_steps_at_one_time_is_the_same_usage(steps: int) -> None:
    lab = Lab(name="A")
    for _ in range(steps):
        lab = book(lab, 3 * 10**13 // steps, 5, HALF)
    want = book(Lab(name="A"), 3 * 10**13 // steps * steps, 5, HALF)
    assert lab.usage_micro == pytest.approx(want.usage_micro, rel=1e-9)
    assert order_key(lab, HALF) == pytest.approx(order_key(want, HALF), abs=2)


def test_small_samples_never_vanish_beside_a_long_half_life() -> None:
    """S4: 5 s samples for a day equal one booking, as exact integers are summed."""
    lab = Lab(name="A")
    for i in range(17_280):
        lab = book(lab, 5_000 * 34_100, i * 5_000, HALF)
    whole = 86_400_000 * 34_100
    assert whole * 0.5 ** (1 / 7) < lab.usage_micro < whole


@pytest.mark.parametrize("usage", [10.0**e for e in range(-6, 19, 3)])
def test_heavy_use_never_wraps_and_light_use_never_reaches_zero(usage: float) -> None:
    """S3: from 1e-6 to 1e18 TFLOP-s; also S9: after five idle years."""
    lab = b.lab("A", usage)
    twice = book(lab, round(usage * 1e6), 0, HALF)
    assert order_key(twice, HALF) - order_key(lab, HALF) == pytest.approx(1e9, rel=1e-6)
    later = decayed_micro(lab, 5 * YEAR, HALF)
    assert later > 0
    assert math.isfinite(later)
    again = book(lab, 1, 5 * YEAR, HALF)
    assert again.usage_micro >= 1
    assert order_key(again, HALF) > ZERO_KEY


def test_the_line_from_nothing_to_1e18_is_in_order() -> None:
    labs = [Lab(name="Z"), *(b.lab(f"L{e:02d}", 10.0**e) for e in range(-6, 19))]
    keys = [order_key(x, HALF) for x in labs]
    assert keys == sorted(set(keys))


def test_decay_alone_never_changes_the_order() -> None:
    """S14, S22: the key has no now in it: nothing has to run for it to be right."""
    a, c = b.lab("A", 100), Lab(name="C", usage_micro=101e6, as_of_ms=0)
    moved = Lab(name="A", usage_micro=decayed_micro(a, YEAR, HALF), as_of_ms=YEAR)
    assert order_key(moved, HALF) == order_key(a, HALF)
    assert order_key(moved, HALF) < order_key(c, HALF)


def test_equal_use_that_is_older_weighs_less() -> None:
    old, new = Lab(name="A", usage_micro=1e9), Lab(name="B", usage_micro=1e9, as_of_ms=DAY_MS)
    assert order_key(old, HALF) < order_key(new, HALF)


def test_weight_divides_usage() -> None:
    heavy, light = b.lab("A", 200, weight=4.0), b.lab("B", 100, weight=1.0)
    assert order_key(heavy, HALF) < order_key(light, HALF)
    assert order_key(b.lab("C", 200, weight=2.0), HALF) == order_key(light, HALF)


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_positive_number_is_refused(weight: float) -> None:
    with pytest.raises(DureError):
        check_weight(weight)


def test_booking_keeps_what_else_a_lab_has() -> None:
    lab = b.lab("A", 5, title="Bio", weight=3.0, limits=Limits(slots=2))
    done = book(lab, 7, 9, HALF)
    assert (done.title, done.weight, done.limits) == ("Bio", 3.0, Limits(slots=2))


def test_a_booking_from_before_the_last_one_is_decayed_to_it() -> None:
    one = book(book(Lab(name="A"), 10**12, 0, HALF), 10**12, DAY_MS, HALF)
    two = book(book(Lab(name="A"), 10**12, DAY_MS, HALF), 10**12, 0, HALF)
    assert one.as_of_ms == two.as_of_ms == DAY_MS
    assert one.usage_micro == pytest.approx(two.usage_micro, rel=1e-12)


costs = st.lists(st.tuples(st.integers(1, 10**24), st.integers(0, 20 * YEAR)), min_size=1)


@settings(max_examples=200, deadline=None)
@given(costs, st.randoms(use_true_random=False))
def test_the_order_of_bookings_does_not_matter_and_nothing_breaks(bookings, rnd) -> None:
    shuffled = list(bookings)
    rnd.shuffle(shuffled)
    labs = []
    for order in (bookings, shuffled):
        lab = Lab(name="A")
        for cost, at in order:
            lab = book(lab, cost, at, HALF)
            assert math.isfinite(lab.usage_micro)
            assert lab.usage_micro > 0
        labs.append(lab)
    last = max(at for _, at in bookings)
    assert labs[0].as_of_ms == labs[1].as_of_ms == last
    assert labs[0].usage_micro == pytest.approx(labs[1].usage_micro, rel=1e-9)


def test_the_order_of_policy_4s_example() -> None:
    """BCG 24k (2 GPUs), KDG 30k (1), OSL 116k (2), OSL 116k (1)."""
    labs = [b.lab("OSL", 116_000), b.lab("KDG", 30_000), b.lab("BCG", 24_000)]
    views = [
        b.view(1, "OSL", 2, entered=1),
        b.view(2, "OSL", 1, entered=2),
        b.view(3, "KDG", 1, entered=3),
        b.view(4, "BCG", 2, entered=4),
    ]
    pool = b.pool([b.R4090], [b.node("n", (b.R4090, 2))])
    assert [v.id for v in b.index(labs, views).ranked(pool)] == [4, 3, 1, 2]


def test_labs_with_equal_usage_form_one_line_by_entry_then_id() -> None:
    labs = [b.lab("A", 50), b.lab("B", 50), b.lab("C")]
    views = [
        b.view(1, "A", entered=30),
        b.view(2, "B", entered=10),
        b.view(3, "A", entered=20),
        b.view(5, "B", entered=20),
        b.view(4, "A", entered=20),
        b.view(6, "C", entered=99),
    ]
    pool = b.pool([b.R4090], [b.node("n", (b.R4090, 1))])
    assert [v.id for v in b.index(labs, views).ranked(pool)] == [6, 2, 3, 4, 5, 1]
