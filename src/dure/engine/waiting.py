"""Everything about why one job waits: reason, rank and what moved it, places, time, ways out.

Made on demand, never for all jobs each cycle. Nothing here decides anything.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from dure import wire
from dure.core.explain import PlacementNote, Slots, explain
from dure.core.fairshare import decayed_micro, use_key
from dure.core.forecast import Forecast
from dure.core.messages import HINTS, RANK_CHANGES, duration, say
from dure.core.model import (
    CHARGED,
    WAITING,
    Job,
    JobId,
    Lab,
    LabId,
    LedgerEntry,
    Phase,
    Role,
    Shape,
    User,
    Value,
)
from dure.core.placement import shape_of
from dure.core.plan import ReasonCode
from dure.core.policy import Policy
from dure.engine import render
from dure.engine.engine import Engine
from dure.engine.forecast import FAR, imagined, look_ahead
from dure.engine.queries import seen, slots_of
from dure.engine.sooner import Hint, hints
from dure.ports import Reads

CHANGES = 3
LOOK_BACK_MS = 86_400_000
"""Charges older than a day are not told as what moved a job."""


class RankChange(Value, frozen=True, kw_only=True):
    """A charge since the job entered that moved it: its own lab's, or one that let it pass."""

    lab: LabId
    job: JobId
    at_ms: int
    cost_micro: int
    own: bool


def why(engine: Engine, actor: User, lang: str, job_id: JobId) -> wire.WhyOut:
    """Say why a job waits, by the planner's own code."""
    with engine.store.read() as tx:
        found = seen(tx, actor, job_id)
        slots = slots_of(engine, tx, tx.user(found.user) or actor)
        words = render.state_words(found, lang, engine.clock.now_ms())
        if found.state not in WAITING:
            return wire.WhyOut(job=found.id, state=found.state, state_text=words, reason=None)
        changes = rank_changes(engine, tx, found)
        last = tx.attempt(found.id, found.epoch) if found.refusals else None
    told = _told(engine, lang, found, slots, changes, words, open_books=actor.role is Role.ADMIN)
    return _with_refusal(told, last.detail if last is not None else "")


def _with_refusal(told: wire.WhyOut, said: str) -> wire.WhyOut:
    """Add what the node said, in its words, where it refused to start the job."""
    reason = told.reason
    if not said or reason is None or reason.code != ReasonCode.LAUNCH_RETRY:
        return told
    named = msgspec.structs.replace(
        reason, text=f"{reason.text} ({said})", params={**reason.params, "said": said}
    )
    return msgspec.structs.replace(told, reason=named)


def _told(
    engine: Engine,
    lang: str,
    found: Job,
    slots: Slots,
    changes: list[RankChange],
    words: str,
    *,
    open_books: bool,
) -> wire.WhyOut:
    world = engine.world
    expected = eta(engine, found)
    with world.lock:
        told = explain(found, world.index, world.pool, world.phase, slots, engine.policy)
    # After a clock set back, time stands still until it has come back.
    now_ms = max(engine.clock.now_ms(), world.index.now_ms)
    shape = shape_of(found, world.index.now_ms)
    notes = [_when_free(engine, shape, n) for n in told.placements]
    return wire.WhyOut(
        job=found.id,
        state=found.state,
        state_text=words,
        reason=render.reason_out(told.reason, lang),
        more=[render.reason_out(r, lang) for r in told.more],
        rank=told.rank,
        ahead_labs=list(told.ahead_labs),
        placements=[render.note_out(n) for n in notes],
        eta=render.eta_out(expected, lang, now_ms),
        sooner=[_hint_out(h, found, lang) for h in hints(engine, found)],
        changes=[_change_out(c, lang, now_ms, open_books=open_books) for c in changes],
    )


def eta(engine: Engine, job: Job) -> Forecast | None:
    """The newest forecast of a promoted job; one far behind is rehearsed on demand."""
    if engine.world.phase is not Phase.NORMAL:
        return None
    look_ahead(engine)
    kept = engine.outlook.forecasts.get(job.id)
    if kept is not None and kept.entered_ms == job.entered_ms:
        return kept
    world = engine.world
    with world.lock:
        view = world.index.view(job.id)
        if view is None or not world.index.is_ranked(job.id, world.pool):
            return None
        far_behind = (world.index.rank(job.id, world.pool) or 0) > FAR
    return None if far_behind else imagined(engine, view)


# -- when places free ----------------------------------------------------------------


def _when_free(engine: Engine, shape: Shape, note: PlacementNote) -> PlacementNote:
    """Add when enough GPUs of a fitting placement are expected to be free."""
    if not (note.fits and note.in_service) or note.idle >= shape.num_gpus:
        return note
    missing = shape.num_gpus - note.idle
    ends = engine.outlook.ends_ms
    with engine.world.lock:
        leases = [
            (len(x.gpus), ends.get(x.job))
            for x in engine.world.pool.leases.values()
            if (x.placement.node, x.placement.tier) == (note.node, note.tier)
        ]
    for gpus, end_ms in sorted(leases, key=lambda x: (x[1] is None, x[1] or 0)):
        missing -= gpus
        if missing <= 0:
            return msgspec.structs.replace(note, free_at_ms=end_ms)
    return note


# -- what moved it -------------------------------------------------------------------


def rank_changes(engine: Engine, tx: Reads, job: Job) -> list[RankChange]:
    """The newest charges since `job` entered that changed its lab's place, newest first.

    Charges of its own lab moved it back; of another lab those that put that lab behind.
    """
    now_ms = engine.clock.now_ms()
    since_ms = max(job.entered_ms, now_ms - LOOK_BACK_MS)
    if not job.entered_ms:
        return []
    lines: dict[LabId, list[LedgerEntry]] = defaultdict(list)
    for line in tx.ledger(since_ms=since_ms):
        if line.kind in CHARGED and line.cost_micro:
            lines[line.lab].append(line)
    labs = {lab.name: lab for lab in tx.labs()}
    own = labs.get(job.lab) or Lab(name=job.lab)
    found = [_change(line, own=True) for line in lines.pop(job.lab, ())]
    for name, booked in lines.items():
        passed = _passed(labs.get(name) or Lab(name=name), own, booked, now_ms, engine.policy)
        if passed is not None:
            found.append(_change(passed, own=False))
    return sorted(found, key=lambda c: (-c.at_ms, c.lab))[:CHANGES]


def _passed(
    other: Lab, own: Lab, booked: list[LedgerEntry], now_ms: int, policy: Policy
) -> LedgerEntry | None:
    """The charge that put `other` behind `own`, if one since then did."""
    half_life_ms = policy.half_life_ms
    mine = use_key(decayed_micro(own, now_ms, half_life_ms), own.weight, now_ms, half_life_ms)
    use = decayed_micro(other, now_ms, half_life_ms)
    if use_key(use, other.weight, now_ms, half_life_ms) <= mine:
        return None
    for line in sorted(booked, key=lambda e: e.booked_ms, reverse=True):
        use -= line.cost_micro * 0.5 ** ((now_ms - line.booked_ms) / half_life_ms)
        if use_key(use, other.weight, now_ms, half_life_ms) <= mine:
            return line
    return None


def _change(line: LedgerEntry, *, own: bool) -> RankChange:
    return RankChange(
        lab=line.lab, job=line.job, at_ms=line.booked_ms, cost_micro=line.cost_micro, own=own
    )


# -- rendering -----------------------------------------------------------------------


def _hint_out(hint: Hint, job: Job, lang: str) -> wire.HintOut:
    spoken = {
        "value": hint.value,
        "node": hint.placement.node,
        "tier": hint.placement.tier,
        "asked": job.request.num_gpus,
    }
    return wire.HintOut(
        change=hint.change,
        value=hint.value,
        node=hint.placement.node,
        tier=hint.placement.tier,
        text=say(HINTS[hint.change], lang, spoken),
    )


def _change_out(
    change: RankChange, lang: str, now_ms: int, *, open_books: bool
) -> wire.RankChangeOut:
    """Another lab's account is its own business: only that it was charged is told."""
    ago = duration((now_ms - change.at_ms) / 1000, lang)
    cost = render.tflop_s(change.cost_micro)
    key = "own" if change.own else "passed"
    spoken = {"lab": change.lab, "job": change.job, "cost": cost, "ago": ago}
    told = change.own or open_books
    return wire.RankChangeOut(
        lab=change.lab,
        job=change.job if told else None,
        at_ms=change.at_ms,
        charged_tflop_s=cost if told else None,
        own=change.own,
        text=say(RANK_CHANGES[key], lang, spoken),
    )
