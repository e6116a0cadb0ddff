"""Seeing a node go and come back: two levels, hysteresis, penalty, and self-doubt.

Rule: `TABLE` is the only place that says what a signal does to a node; times are by the
lease queue's clock. Who probes, listens and sweeps is `engine.watchdog`.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from dure.core.lease import Bye, NodeMark, NodeView, SweepRule, Swept
from dure.core.model import NodeHealth, Value


class Detection(StrEnum):
    """`beats`: silence is noticed, then probed. `polling`: probes alone decide."""

    BEATS = "beats"
    POLLING = "polling"


class HealthRule(Value, frozen=True, kw_only=True):
    """The numbers of chapter 6 and of the edge protocol, in seconds; settings set them."""

    detection: Detection = Detection.BEATS
    beat_s: float = 15.0
    overdue_s: float = 5.0
    """A beat this late makes the node suspect."""
    burst_s: tuple[float, ...] = (0.0, 3.0, 8.0, 15.0)
    """Probes after that; all failed: OFFLINE."""
    closed_grace_s: float = 3.0
    """A connection that has closed may come back this long before it is probed."""
    stable_probe_s: float = 30.0
    suspected_probe_s: float = 10.0
    offline_probe_s: float = 60.0
    suspected_limit_s: float = 300.0
    ttl_s: float = 90.0
    stale_s: float = 60.0
    """A reading of the GPUs older than this says nothing."""
    ack_s: float = 30.0
    jump_s: float = 5.0
    """Clocks that part by more than this in one tick have been set."""
    wins: int = 2
    """Signs of life in a row for a return, and good readings for READY."""
    poll_failures: int = 3
    refusals: int = 2
    penalty_fall: int = 1000
    penalty_half_life_s: float = 600.0
    penalty_stop: int = 2000
    """Above it the node gets no work, until it is below `penalty_free`."""
    penalty_free: int = 750


class Signal(StrEnum):
    """Everything that can happen to a node at level 1."""

    BEAT = "beat"
    OVERDUE = "overdue"
    CLOSED = "closed"
    PROBE_OK = "probe_ok"
    PROBE_FAILED = "probe_failed"
    PROBE_REFUSED = "probe_refused"
    """The machine answers, its agent does not: nobody listens there."""
    BYE_OFF = "bye_off"
    BYE_RESTART = "bye_restart"
    TOO_LONG = "too_long"


class Move(StrEnum):
    """What a signal does."""

    STAY = "stay"
    FORGIVE = "forgive"
    """Earlier failures do not count any more."""
    DOUBT = "doubt"
    """Earlier signs of life do not count any more."""
    SUSPECT = "suspect"
    FAIL = "fail"
    """One more failure; the last one that is allowed leads to OFFLINE."""
    WIN = "win"
    """One more sign of life; enough in a row lead back to STABLE."""
    FALL = "fall"


M, G = Move, Signal
_BYES = {G.BYE_OFF: M.FALL, G.BYE_RESTART: M.SUSPECT}
_NOTHING = dict.fromkeys(Signal, M.STAY)
_BACK = {G.OVERDUE: M.DOUBT, G.CLOSED: M.DOUBT, G.BYE_OFF: M.DOUBT, G.BYE_RESTART: M.DOUBT}

TABLE: dict[Detection, dict[NodeHealth, dict[Signal, Move]]] = {
    Detection.BEATS: {
        NodeHealth.STABLE: {**_NOTHING, **_BYES, G.OVERDUE: M.SUSPECT, G.CLOSED: M.SUSPECT},
        NodeHealth.SUSPECTED: {
            **_NOTHING,
            G.BEAT: M.WIN,
            G.OVERDUE: M.DOUBT,
            G.CLOSED: M.DOUBT,
            # An agent that answers but does not beat cannot reach the queue: not well, not dead.
            G.PROBE_OK: M.FORGIVE,
            G.PROBE_FAILED: M.FAIL,
            G.PROBE_REFUSED: M.FAIL,
            G.BYE_OFF: M.FALL,
            G.BYE_RESTART: M.DOUBT,
            G.TOO_LONG: M.FALL,
        },
        NodeHealth.OFFLINE: {**_NOTHING, **_BACK, G.BEAT: M.WIN},
    },
    Detection.POLLING: {
        NodeHealth.STABLE: {
            **_NOTHING,
            **_BYES,
            G.PROBE_FAILED: M.SUSPECT,
            G.PROBE_REFUSED: M.SUSPECT,
        },
        NodeHealth.SUSPECTED: {
            **_NOTHING,
            G.PROBE_OK: M.WIN,
            G.PROBE_FAILED: M.FAIL,
            G.PROBE_REFUSED: M.FAIL,
            G.BYE_OFF: M.FALL,
            G.BYE_RESTART: M.DOUBT,
            G.TOO_LONG: M.FALL,
        },
        NodeHealth.OFFLINE: {
            **_NOTHING,
            G.PROBE_OK: M.WIN,
            G.PROBE_FAILED: M.DOUBT,
            G.PROBE_REFUSED: M.DOUBT,
            G.BYE_OFF: M.DOUBT,
            G.BYE_RESTART: M.DOUBT,
        },
    },
}


class Level1(Value, frozen=True, kw_only=True):
    """Whether a node is there."""

    state: NodeHealth
    since_ms: int
    wins: int = 0
    failures: int = 0
    refused: int = 0
    probes: int = 0
    """Probes sent since `probe_from_ms`."""
    probe_from_ms: int = 0
    probed_ms: int = 0
    closed: bool = False
    penalty: float = 0.0
    penalty_ms: int = 0
    """When `penalty` was last reckoned; it halves from there."""
    held: bool = False
    """Above the limit, and not yet below the lower one."""
    cause: str = ""


class Level2(Value, frozen=True, kw_only=True):
    """Whether its GPUs may be used; samples are counted, not looks at them."""

    ready: bool = False
    good: int = 0
    sample_ms: int = 0


class Watched(Value, frozen=True, kw_only=True):
    """All that the watchdog remembers of one node."""

    level1: Level1
    level2: Level2 = Level2()
    seen_ms: int = 0
    bye_ms: int = 0
    was_connected: bool = False


def found(view: NodeView, now_ms: int, rule: HealthRule) -> Watched:
    """A node at the first look: as it was left, never better."""
    level1 = Level1(
        state=view.state or NodeHealth.SUSPECTED,
        since_ms=now_ms,
        # A node that beats needs no probe; this gives its next beat the time to come.
        probe_from_ms=now_ms + _ms(rule.beat_s + rule.overdue_s),
        penalty=float(view.penalty),
        penalty_ms=now_ms,
        held=view.penalty_until_ms > now_ms,
    )
    return Watched(level1=level1, level2=Level2(ready=view.ready), bye_ms=view.bye_ms)


def step(level: Level1, signal: Signal, now_ms: int, rule: HealthRule) -> Level1:
    """The node after one signal."""
    change = msgspec.structs.replace
    match TABLE[rule.detection][level.state][signal]:
        case Move.STAY:
            return level
        case Move.FORGIVE:
            return change(level, failures=0, refused=0)
        case Move.DOUBT:
            return change(level, wins=0, closed=level.closed or signal is Signal.CLOSED)
        case Move.SUSPECT:
            return _suspect(level, signal, now_ms, rule)
        case Move.WIN:
            return _win(level, signal, now_ms, rule)
        case Move.FAIL:
            return _fail(level, signal, now_ms, rule)
        case Move.FALL:
            return _fall(level, signal, now_ms, rule)


def _suspect(level: Level1, signal: Signal, now_ms: int, rule: HealthRule) -> Level1:
    grace_s = {Signal.CLOSED: rule.closed_grace_s, Signal.BYE_RESTART: rule.ttl_s}
    failed = signal in (Signal.PROBE_FAILED, Signal.PROBE_REFUSED)
    return msgspec.structs.replace(
        level,
        state=NodeHealth.SUSPECTED,
        since_ms=now_ms,
        wins=0,
        failures=int(failed),
        refused=int(signal is Signal.PROBE_REFUSED),
        probes=0,
        probe_from_ms=now_ms + _ms(grace_s.get(signal, 0.0)),
        closed=signal is Signal.CLOSED,
        cause=signal.value,
    )


def _win(level: Level1, signal: Signal, now_ms: int, rule: HealthRule) -> Level1:
    wins = level.wins + 1
    if wins < rule.wins:
        return msgspec.structs.replace(level, wins=wins, failures=0, refused=0)
    return msgspec.structs.replace(
        level,
        state=NodeHealth.STABLE,
        since_ms=now_ms,
        wins=0,
        failures=0,
        refused=0,
        closed=False,
        cause=signal.value,
    )


def _fail(level: Level1, signal: Signal, now_ms: int, rule: HealthRule) -> Level1:
    beats = rule.detection is Detection.BEATS
    if beats and level.wins:
        return level  # asked before the beats came back
    refused = level.refused + 1 if signal is Signal.PROBE_REFUSED else 0
    level = msgspec.structs.replace(level, wins=0, failures=level.failures + 1, refused=refused)
    allowed = len(rule.burst_s) if beats else rule.poll_failures
    if level.failures >= allowed or (beats and level.closed and refused >= rule.refusals):
        return _fall(level, signal, now_ms, rule)
    return level


def _fall(level: Level1, signal: Signal, now_ms: int, rule: HealthRule) -> Level1:
    """Falling without a good-bye costs; it is kept in `refused` that nobody listens there."""
    cost = 0 if signal is Signal.BYE_OFF else rule.penalty_fall
    penalty = decayed(level, now_ms, rule) + cost
    return msgspec.structs.replace(
        level,
        state=NodeHealth.OFFLINE,
        since_ms=now_ms,
        wins=0,
        failures=0,
        probes=0,
        probe_from_ms=now_ms,
        penalty=penalty,
        penalty_ms=now_ms,
        held=level.held or penalty > rule.penalty_stop,
        cause=signal.value,
    )


def decayed(level: Level1, now_ms: int, rule: HealthRule) -> float:
    """The penalty now."""
    passed = max(0, now_ms - level.penalty_ms) / _ms(rule.penalty_half_life_s)
    return level.penalty * math.pow(0.5, passed)


def held_until_ms(level: Level1, now_ms: int, rule: HealthRule) -> int:
    """Until when the node gets no work for its flapping; 0: it may have some."""
    penalty = decayed(level, now_ms, rule)
    if not level.held or penalty <= rule.penalty_free:
        return 0
    halvings = math.log2(level.penalty / rule.penalty_free)
    return level.penalty_ms + math.ceil(halvings * _ms(rule.penalty_half_life_s))


def sample(level: Level2, at_ms: int, *, good: bool, rule: HealthRule) -> Level2:
    """One reading of the GPUs; the same one again changes nothing."""
    if at_ms <= level.sample_ms:
        return level
    if not good:
        return Level2(sample_ms=at_ms)
    count = min(level.good + 1, rule.wins)
    return Level2(ready=level.ready or count >= rule.wins, good=count, sample_ms=at_ms)


def stale(level: Level2, now_ms: int, rule: HealthRule) -> Level2:
    """Unavailable when the newest reading is too old."""
    if now_ms - level.sample_ms <= _ms(rule.stale_s):
        return level
    return Level2(sample_ms=level.sample_ms)


def look(
    old: Watched,
    view: NodeView,
    connected: bool | None,
    now_ms: int,
    listening_ms: int,
    rule: HealthRule,
) -> Watched:
    """The node after one look at what the queue knows of it.

    `listening_ms` is since when this control plane hears the queue without a break:
    silence before that is its own. `connected` None: the queue cannot tell.
    """
    level = old.level1
    for signal in signals(old, view, connected, now_ms, listening_ms, rule):
        level = step(level, signal, now_ms, rule)
    if not decayed(level, now_ms, rule) > rule.penalty_free:
        level = msgspec.structs.replace(level, held=False)
    second = sample(old.level2, view.last_sample_ms, good=view.report.good, rule=rule)
    second = stale(second, now_ms, rule)
    if level.state is NodeHealth.OFFLINE and old.level1.state is not NodeHealth.OFFLINE:
        second = Level2(sample_ms=second.sample_ms)
    return Watched(
        level1=level,
        level2=second,
        seen_ms=max(old.seen_ms, view.last_seen_ms),
        bye_ms=max(old.bye_ms, view.bye_ms),
        was_connected=old.was_connected if connected is None else connected,
    )


def signals(
    old: Watched,
    view: NodeView,
    connected: bool | None,
    now_ms: int,
    listening_ms: int,
    rule: HealthRule,
) -> list[Signal]:
    """What has happened to a node since the last look, in order."""
    told = []
    if view.last_seen_ms > old.seen_ms and old.seen_ms:
        told.append(Signal.BEAT)
    if view.bye is not None and view.bye_ms > old.bye_ms:
        told.append(Signal.BYE_OFF if view.bye is Bye.OFF else Signal.BYE_RESTART)
    silent_ms = now_ms - max(view.last_seen_ms, listening_ms)
    # Who has said that it restarts is not overdue before its leases are.
    patience_s = rule.ttl_s if view.bye is Bye.RESTART else rule.beat_s + rule.overdue_s
    if silent_ms > _ms(patience_s):
        told.append(Signal.OVERDUE)
    heard = now_ms - listening_ms > _ms(rule.closed_grace_s)
    if old.was_connected and connected is False and heard and view.bye is None:
        told.append(Signal.CLOSED)
    suspected = old.level1.state is NodeHealth.SUSPECTED
    if suspected and now_ms - old.level1.since_ms > _ms(rule.suspected_limit_s):
        told.append(Signal.TOO_LONG)
    return told


def probe_due(level: Level1, now_ms: int, rule: HealthRule) -> bool:
    """Whether a probe is to be sent now."""
    beats = rule.detection is Detection.BEATS
    passed_ms = now_ms - level.probe_from_ms
    if level.state is NodeHealth.SUSPECTED and beats:
        if level.wins:
            return False
        if level.probes < len(rule.burst_s):
            return passed_ms >= _ms(rule.burst_s[level.probes])
        return now_ms - level.probed_ms >= _ms(rule.suspected_probe_s)
    if beats:
        return False  # stable: beats arrive; offline: only beats bring it back
    period_s = {
        NodeHealth.STABLE: rule.stable_probe_s,
        NodeHealth.SUSPECTED: rule.suspected_probe_s,
        NodeHealth.OFFLINE: rule.offline_probe_s,
    }[level.state]
    return now_ms - level.probed_ms >= _ms(period_s)


def probed(level: Level1, now_ms: int) -> Level1:
    """One more probe is on its way."""
    return msgspec.structs.replace(level, probes=level.probes + 1, probed_ms=now_ms)


def mark(watched: Watched, view: NodeView, now_ms: int, rule: HealthRule) -> NodeMark:
    """The verdict as others read it."""
    level = watched.level1
    offline = level.state is NodeHealth.OFFLINE
    return NodeMark(
        node=view.report.node,
        state=level.state,
        ready=watched.level2.ready and level.state is NodeHealth.STABLE,
        failures=level.failures,
        good_samples=watched.level2.good,
        penalty=round(level.penalty),
        penalty_until_ms=held_until_ms(level, now_ms, rule),
        dead=offline and (level.refused >= rule.refusals or view.bye is Bye.OFF),
    )


class Doubt(Value, frozen=True, kw_only=True):
    """Whether this control plane may judge leases; times are its own clock's."""

    armed_ms: int
    run_id: str = ""
    offset_ms: int | None = None
    """How far the queue's clock is ahead of this one's."""
    braked_ms: int = 0
    """Since when the brake has held; 0: it does not."""


def doubting(now_ms: int, rule: HealthRule) -> Doubt:
    """At the start, and whenever the queue was away: one full TTL before any judgement."""
    return Doubt(armed_ms=now_ms + _ms(rule.ttl_s))


def sweep_rule(doubt: Doubt, now_ms: int, rule: HealthRule) -> SweepRule:
    """How to sweep now; with an empty run id a sweep only tells how the queue is."""
    armed = now_ms >= doubt.armed_ms
    waited = doubt.braked_ms and now_ms - doubt.braked_ms >= _ms(rule.ttl_s)
    return SweepRule(
        run_id=doubt.run_id if armed else "",
        expected_ms=0 if doubt.offset_ms is None else now_ms + doubt.offset_ms,
        jump_ms=_ms(rule.jump_s),
        ack_ms=_ms(rule.ack_s),
        brake=not waited,
    )


def after_sweep(doubt: Doubt, swept: Swept, now_ms: int, rule: HealthRule) -> Doubt:
    """What the sweep has shown of the queue: another life, a clock that was set, a brake."""
    offset_ms = swept.now_ms - now_ms
    moved = doubt.offset_ms is not None and abs(offset_ms - doubt.offset_ms) > _ms(rule.jump_s)
    if swept.run_id != doubt.run_id or moved:
        again = doubting(now_ms, rule)
        return msgspec.structs.replace(again, run_id=swept.run_id, offset_ms=offset_ms)
    braked_ms = (doubt.braked_ms or now_ms) if swept.braked else 0
    return msgspec.structs.replace(doubt, offset_ms=offset_ms, braked_ms=braked_ms)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
