"""Seeing nodes: every (detection, state, signal), then days of them told as sentences."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from dure.core import health
from dure.core.health import Detection, Doubt, HealthRule, Level1, Level2, Move, Signal, Watched
from dure.core.lease import Bye, NodeReport, NodeView, Swept
from dure.core.model import NodeHealth as H

RULE = HealthRule()
POLL = HealthRule(detection=Detection.POLLING)
T0 = 1_800_000_000_000
FAILS = (Signal.PROBE_FAILED, Signal.PROBE_REFUSED)


def level(state: H, **more) -> Level1:
    return Level1(state=state, since_ms=T0, penalty_ms=T0, **more)


def run(start: Level1, *signals: Signal, rule: HealthRule = RULE) -> Level1:
    for signal in signals:
        start = health.step(start, signal, T0, rule)
    return start


# -- the table -------------------------------------------------------------------------


def test_table_is_complete():
    for detection, state in itertools.product(Detection, H):
        assert set(health.TABLE[detection][state]) == set(Signal)


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("state", H)
@pytest.mark.parametrize("rule", [RULE, POLL], ids=["beats", "polling"])
def test_every_cell(rule, state, signal):
    """What one signal does, from a node with and without a history."""
    cell = health.TABLE[rule.detection][state][signal]
    fresh = run(level(state), signal, rule=rule)
    one_win = run(level(state, wins=1), signal, rule=rule)
    failures = 3 if rule is RULE else 2
    failing = run(level(state, failures=failures), signal, rule=rule)
    match cell:
        case Move.STAY:
            assert fresh == level(state)
        case Move.FORGIVE:
            assert (failing.failures, failing.state) == (0, state)
        case Move.DOUBT:
            assert (one_win.wins, one_win.state) == (0, state)
        case Move.SUSPECT:
            assert (fresh.state, fresh.cause) == (H.SUSPECTED, signal)
            assert fresh.failures == int(signal in FAILS)
        case Move.WIN:
            assert (fresh.state, fresh.wins) == (state, 1)
            assert (one_win.state, one_win.wins) == (H.STABLE, 0)
        case Move.FAIL:
            assert (fresh.state, fresh.failures) == (state, 1)
            assert failing.state is H.OFFLINE
        case Move.FALL:
            assert fresh.state is H.OFFLINE
            assert (fresh.penalty > 0) == (signal is not Signal.BYE_OFF)


@pytest.mark.parametrize("rule", [RULE, POLL], ids=["beats", "polling"])
def test_arrows(rule):
    """STABLE → SUSPECTED → OFFLINE by loss; only a good-bye skips; back only by two wins."""
    for state, signal in itertools.product(H, Signal):
        for wins, failures in itertools.product(range(2), range(4)):
            before = level(state, wins=wins, failures=failures)
            after = run(before, signal, rule=rule)
            if after.state is H.STABLE and state is not H.STABLE:
                assert wins == 1
                assert signal is (Signal.BEAT if rule is RULE else Signal.PROBE_OK)
            if after.state is H.OFFLINE and state is H.STABLE:
                assert signal is Signal.BYE_OFF
            assert not (state is H.OFFLINE and after.state is H.SUSPECTED)


def test_two_successes_must_be_in_a_row():
    for start in (H.SUSPECTED, H.OFFLINE):
        assert run(level(start), Signal.BEAT, Signal.OVERDUE, Signal.BEAT).state is start
        assert run(level(start), Signal.BEAT, Signal.BEAT).state is H.STABLE
    twice = run(level(H.OFFLINE), Signal.PROBE_OK, Signal.PROBE_FAILED, Signal.PROBE_OK, rule=POLL)
    assert twice.state is H.OFFLINE


def test_plain_schedule_falls_at_the_third_failure():
    assert run(level(H.STABLE), *[Signal.PROBE_FAILED] * 2, rule=POLL).state is H.SUSPECTED
    assert run(level(H.STABLE), *[Signal.PROBE_FAILED] * 3, rule=POLL).state is H.OFFLINE


def test_nobody_listening_twice_is_enough_after_a_closed_connection():
    closed = run(level(H.STABLE), Signal.CLOSED)
    assert run(closed, *[Signal.PROBE_REFUSED] * 2).state is H.OFFLINE
    silent = run(level(H.STABLE), Signal.OVERDUE)
    assert run(silent, *[Signal.PROBE_REFUSED] * 2).state is H.SUSPECTED


def test_late_failures_do_not_undo_a_return():
    back = run(level(H.SUSPECTED), Signal.BEAT, *[Signal.PROBE_FAILED] * 5)
    assert (back.state, back.wins) == (H.SUSPECTED, 1)


# -- a node over time ------------------------------------------------------------------


class Day:
    """One node on a virtual clock, looked at every second, as the watchdog does."""

    def __init__(self, rule: HealthRule = RULE) -> None:
        self.rule = rule
        self.now = T0
        self.listening = T0 - 3_600_000
        self.view = NodeView(
            report=NodeReport(node="n1", sample=1, good=True),
            last_seen_ms=T0,
            last_sample_ms=T0,
            state=H.STABLE,
            ready=True,
        )
        self.seen = health.found(self.view, T0, rule)
        self.connected: bool | None = True
        self.answer = Signal.PROBE_FAILED
        self.probes = 0
        self.messages = 0
        self.trail: list[tuple[float, H]] = [(0.0, H.STABLE)]
        self.look()

    def beat(self, *, good: bool = True) -> None:
        self.messages += 1
        report = msgspec.structs.replace(self.view.report, good=good)
        self.set(report=report, last_seen_ms=self.now, last_sample_ms=self.now, bye=None)

    def set(self, **fields) -> None:
        self.view = msgspec.structs.replace(self.view, **fields)

    def look(self) -> None:
        self.seen = health.look(
            self.seen, self.view, self.connected, self.now, self.listening, self.rule
        )
        if health.probe_due(self.seen.level1, self.now, self.rule):
            self.probes += 1
            sent = health.probed(self.seen.level1, self.now)
            answered = health.step(sent, self.answer, self.now, self.rule)
            self.seen = msgspec.structs.replace(self.seen, level1=answered)
        mark = health.mark(self.seen, self.view, self.now, self.rule)
        self.set(state=mark.state, ready=mark.ready, penalty_until_ms=mark.penalty_until_ms)
        if self.state is not self.trail[-1][1]:
            self.trail.append(((self.now - T0) / 1000, self.state))

    def run(self, seconds: float, beat_s: float | None = None, tick_s: float = 1.0) -> None:
        end = self.now + round(seconds * 1000)
        while self.now < end:
            self.now += round(tick_s * 1000)
            if beat_s and (self.now - T0) % round(beat_s * 1000) == 0:
                self.beat()
            self.look()

    @property
    def state(self) -> H:
        return self.seen.level1.state

    def when(self, state: H) -> float:
        return next(at for at, s in self.trail if s is state)


def test_nothing_is_probed_while_beats_arrive():
    day = Day()
    day.run(86_400, beat_s=15)
    assert day.trail == [(0.0, H.STABLE)]
    assert (day.probes, day.messages) == (0, 5760)
    assert day.view.ready


@pytest.mark.parametrize("death_s", range(15))
def test_silent_loss_within_37_s(death_s):
    day = Day()
    day.run(60 + death_s, beat_s=15)
    day.connected = None
    day.run(60)
    assert day.when(H.SUSPECTED) - (60 + death_s) <= 21
    # One second of this is the look's own period.
    assert day.when(H.OFFLINE) - (60 + death_s) <= 37
    assert day.probes == 4
    assert not day.view.ready


def test_killed_agent_within_8_s():
    day = Day()
    day.run(60, beat_s=15)
    day.connected, day.answer = False, Signal.PROBE_REFUSED
    day.run(30)
    assert day.when(H.OFFLINE) - 60 <= 8
    assert health.mark(day.seen, day.view, day.now, RULE).dead


def test_reconnect_within_the_grace_costs_nothing_but_a_moment():
    day = Day()
    day.run(60, beat_s=15)
    day.connected = False
    day.run(2)
    day.connected = True
    day.beat()  # an agent beats as soon as it is connected again
    day.run(40, beat_s=5)
    assert [s for _, s in day.trail] == [H.STABLE, H.SUSPECTED, H.STABLE]
    assert day.probes == 0
    assert day.seen.level1.penalty == 0


def test_good_byes():
    day = Day()
    day.run(30, beat_s=15)
    day.set(bye=Bye.OFF, bye_ms=day.now)
    day.run(1)
    assert (day.state, day.seen.level1.penalty) == (H.OFFLINE, 0)
    day.run(40, beat_s=5)
    assert day.state is H.STABLE
    day.set(bye=Bye.RESTART, bye_ms=day.now)
    day.connected = False
    day.run(60)
    assert (day.state, day.probes) == (H.SUSPECTED, 0)
    day.run(60)
    assert day.state is H.OFFLINE


def test_an_agent_that_answers_but_never_beats_is_given_five_minutes():
    day = Day()
    day.answer = Signal.PROBE_OK
    day.run(200)
    assert day.state is H.SUSPECTED
    day.run(200)
    assert day.state is H.OFFLINE
    assert 300 <= day.when(H.OFFLINE) - day.when(H.SUSPECTED) <= 302


def test_polling_within_52_s():
    day = Day(POLL)
    day.answer = Signal.PROBE_OK
    day.run(120, beat_s=15)
    assert day.state is H.STABLE
    day.answer = Signal.PROBE_FAILED
    day.run(60)
    assert day.when(H.OFFLINE) - 120 <= 52
    day.answer = Signal.PROBE_OK
    day.run(121)
    assert day.state is H.STABLE
    assert day.when(H.SUSPECTED) < day.when(H.OFFLINE)


def test_silence_of_the_queue_is_nobodys_fault():
    day = Day()
    day.run(60, beat_s=15)
    day.now += 300_000  # Redis was away; it is heard again from here
    day.listening = day.now
    day.connected = False
    day.look()
    day.run(3)
    assert day.state is H.STABLE
    day.connected = True
    day.run(40, beat_s=15)
    assert day.trail == [(0.0, H.STABLE)]


def test_flapping_is_held_back_and_forgiven():
    day = Day()
    for _ in range(3):
        day.run(60)
        assert day.state is H.OFFLINE
        day.run(20, beat_s=5)
        assert day.state is H.STABLE
    until = day.view.penalty_until_ms
    assert 15 * 60_000 < until - day.now < 25 * 60_000
    day.run((until - day.now) / 1000 - 5, beat_s=5)
    assert day.view.penalty_until_ms == pytest.approx(until, abs=1000)
    day.run(10, beat_s=5)
    assert day.view.penalty_until_ms == 0
    day.run(60)
    day.run(20, beat_s=5)
    assert day.view.penalty_until_ms == 0, "one fall alone is no flapping"


def test_what_was_left_is_found_again():
    view = NodeView(
        report=NodeReport(node="n1"),
        last_seen_ms=T0,
        state=H.OFFLINE,
        penalty=3000,
        penalty_until_ms=T0 + 60_000,
        bye=Bye.OFF,
        bye_ms=T0,
    )
    seen = health.found(view, T0, RULE)
    assert (seen.level1.state, seen.level1.held, seen.bye_ms) == (H.OFFLINE, True, T0)
    new = health.found(NodeView(report=NodeReport(node="n2")), T0, RULE)
    assert new.level1.state is H.SUSPECTED
    assert not new.level2.ready


def test_random_weather_keeps_the_rules():
    chance = random.Random(7)
    for rule in (RULE, POLL):
        day = Day(rule)
        for _ in range(3000):
            day.connected = chance.choice([True, True, False, None])
            day.answer = chance.choice([Signal.PROBE_OK, *FAILS])
            if chance.random() < 0.3:
                day.beat(good=chance.random() < 0.8)
            if chance.random() < 0.01:
                day.set(bye=chance.choice(list(Bye)), bye_ms=day.now)
            before = day.seen
            day.run(chance.choice([1, 5, 20]))
            if day.state is not H.STABLE:
                assert not day.view.ready
            if before.level1.state is H.OFFLINE:
                assert day.seen.level1.penalty <= before.level1.penalty + 1000
        assert {s for _, s in day.trail} == set(H)


# -- level 2 ---------------------------------------------------------------------------


def test_samples_are_counted_not_looks():
    one = health.sample(Level2(), T0, good=True, rule=RULE)
    assert not one.ready
    assert health.sample(one, T0, good=True, rule=RULE) == one
    two = health.sample(one, T0 + 1, good=True, rule=RULE)
    assert two.ready
    bad = health.sample(two, T0 + 2, good=False, rule=RULE)
    assert (bad.ready, bad.good) == (False, 0)
    assert not health.sample(bad, T0 + 3, good=True, rule=RULE).ready


def test_old_readings_say_nothing():
    ready = Level2(ready=True, good=2, sample_ms=T0)
    assert health.stale(ready, T0 + 60_000, RULE) == ready
    old = health.stale(ready, T0 + 60_001, RULE)
    assert (old.ready, old.good) == (False, 0)
    assert not health.sample(old, T0 + 70_000, good=True, rule=RULE).ready


def test_falling_offline_forgets_good_samples():
    seen = Watched(level1=level(H.STABLE), level2=Level2(ready=True, good=2, sample_ms=T0))
    view = NodeView(report=NodeReport(node="n1"), last_sample_ms=T0, bye=Bye.OFF, bye_ms=T0)
    after = health.look(seen, view, None, T0, T0, RULE)
    assert after.level2 == Level2(sample_ms=T0)


# -- self-doubt ------------------------------------------------------------------------


def swept(now: int, run_id: str = "r", braked: int = 0) -> Swept:
    return Swept(run_id=run_id, now_ms=now, braked=braked)


def armed(now: int = T0) -> Doubt:
    start = health.after_sweep(health.doubting(now, RULE), swept(now), now, RULE)
    assert health.sweep_rule(start, now, RULE).run_id == ""
    assert health.sweep_rule(start, now + 89_999, RULE).run_id == ""
    assert health.sweep_rule(start, now + 90_000, RULE).run_id == "r"
    return start


def test_no_judgement_before_one_ttl():
    armed()


@pytest.mark.parametrize(
    "seen",
    [swept(T0 + 91_000, "another"), swept(T0 + 91_000 + 3_600_000), swept(T0 + 91_000 - 3_600_000)],
    ids=["restarted", "clock forward", "clock back"],
)
def test_another_life_or_another_time_is_doubted(seen):
    doubt = armed()
    for at in range(T0, T0 + 91_000, 1000):
        doubt = health.after_sweep(doubt, swept(at), at, RULE)
    now = T0 + 91_000
    assert health.sweep_rule(doubt, now, RULE).run_id == "r"
    doubt = health.after_sweep(doubt, seen, now, RULE)
    assert health.sweep_rule(doubt, now + 89_000, RULE).run_id == ""
    assert health.sweep_rule(doubt, now + 90_000, RULE).run_id == seen.run_id


def test_the_brake_holds_for_one_ttl():
    doubt = armed()
    now = T0 + 100_000
    doubt = health.after_sweep(doubt, swept(now, braked=3), now, RULE)
    assert health.sweep_rule(doubt, now + 89_000, RULE).brake
    later = health.after_sweep(doubt, swept(now + 89_000, braked=4), now + 89_000, RULE)
    assert not health.sweep_rule(later, now + 90_000, RULE).brake
    over = health.after_sweep(later, swept(now + 90_000), now + 90_000, RULE)
    assert health.sweep_rule(over, now + 200_000, RULE).brake
