"""Checks of I1 to I10 that return what is wrong, in words.

Run cheaply on every plan before it is applied, in the simulator after every step, and
whole by `dure audit`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

from dure.core.fairshare import decayed_micro, recomputed
from dure.core.model import (
    ACTIVE,
    CHARGED,
    PROMOTED_WAIT,
    SLOT_STATES,
    Attempt,
    Job,
    JobId,
    JobState,
    JobView,
    Lab,
    LedgerEntry,
    LedgerKind,
    Phase,
    PlacementId,
    UserId,
    Value,
)
from dure.core.placement import fits, usable
from dure.core.plan import (
    Absorb,
    Decision,
    Dispatch,
    Plan,
    Release,
    ReleaseCause,
    Reserve,
    Snapshot,
)


class Violation(Value, frozen=True, kw_only=True):
    """A broken invariant: its name and what was seen."""

    invariant: str
    detail: str


class World(Value, frozen=True, kw_only=True):
    """Everything the audit looks at, as read from one store transaction."""

    jobs: tuple[Job, ...]
    attempts: tuple[Attempt, ...]
    ledger: tuple[LedgerEntry, ...]
    labs: tuple[Lab, ...]
    now_ms: int
    half_life_ms: float


def check_plan(snapshot: Snapshot, plan: Plan) -> list[Violation]:
    """I1, I4, I7 on one plan; cheap enough for every cycle.

    The plan is followed in rank order: whoever is not dispatched at its turn could not
    have started whole on what was left then, whatever later jobs take (I4).
    """
    followed = _Followed(snapshot)
    by_job: dict[JobId, list[Decision]] = defaultdict(list)
    for decision in plan.decisions:
        early = isinstance(decision, Release) and decision.cause in _BEFORE_ALL
        if early:
            followed.take(decision)
        else:
            by_job[decision.job].append(decision)
    if snapshot.phase is not Phase.NORMAL:
        if by_job:
            followed.found.append(_v("I7", "work was given out in maintenance"))
        return followed.found
    jobs = {j.id: j for j in snapshot.candidates}
    # A plan that stopped because nothing was idle has not looked at the rest.
    first = set(plan.order)
    looked_at = [*plan.order, *(i for i in jobs if i not in first)]
    for job in (jobs[i] for i in looked_at):
        decisions = by_job.pop(job.id, [])
        if not any(isinstance(d, Dispatch) for d in decisions):
            followed.passed_over(job)
        for decision in decisions:
            followed.take(decision)
    for strange in by_job:
        followed.found.append(_v("I2", f"job {strange} is decided on and no candidate"))
    return followed.found


_BEFORE_ALL = frozenset({ReleaseCause.LOST_RANK, ReleaseCause.BROKEN})


class _Followed:
    """The pool while a plan's decisions are followed one by one."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.found: list[Violation] = []
        self._may_reserve = {snapshot.head, *snapshot.elders}
        self._views = {v.id: v for v in snapshot.placements}
        self._jobs = {j.id: j for j in (*snapshot.candidates, *snapshot.holders)}
        self._left = {v.id: set(v.free) if v.takes_work else set() for v in snapshot.placements}
        self._idle = sum(map(len, self._left.values()))
        self._held: dict[PlacementId, Counter[JobId]] = defaultdict(Counter)
        for holder in snapshot.holders:
            if holder.reservation:
                self._held[holder.reservation.placement][holder.id] = holder.reservation.count

    def take(self, decision: Decision) -> None:
        """Follow one decision."""
        held = self._held[decision.placement]
        match decision:
            case Release():
                held.pop(decision.job, None)
                return
            case Absorb() | Reserve():
                held[decision.job] = decision.count
                if decision.job not in self._may_reserve:
                    self._say("I4", f"job {decision.job} reserves, neither rank 1 nor aged")
            case Dispatch():
                self._dispatch(decision)
        if sum(held.values()) > len(self._left[decision.placement]):
            self._say("I4", f"reserved GPUs of {decision.placement.node} were given away")

    def _dispatch(self, decision: Dispatch) -> None:
        left = self._left[decision.placement]
        if not set(decision.gpus) <= left:
            self._say("I1", f"job {decision.job} gets GPUs that are not idle")
        left -= set(decision.gpus)
        self._idle -= len(decision.gpus)
        if not fits(self._jobs[decision.job].shape, self._views[decision.placement]):
            self._say("I2", f"job {decision.job} does not fit its placement")

    def passed_over(self, job: JobView) -> None:
        """Complain if a job that is not dispatched could start whole on what is left."""
        if self._idle < job.shape.num_gpus:
            return
        for view in self._views.values():
            held = self._held.get(view.id)
            others = sum(n for j, n in held.items() if j != job.id) if held else 0
            room = len(self._left[view.id]) - others
            if room >= job.shape.num_gpus and usable(job.shape, view):
                self._say("I4", f"job {job.id} was passed over on {view.id.node}")

    def _say(self, invariant: str, detail: str) -> None:
        self.found.append(_v(invariant, detail))


def check_world(world: World, slot_limits: Mapping[UserId, int] | None = None) -> list[Violation]:
    """All invariants that can be seen in the stored truth."""
    return [
        *_no_gpu_twice(world),
        *_states(world),
        *_account(world),
        *_epochs(world),
        *_slots(world, slot_limits or {}),
        *_usage(world),
    ]


def _v(invariant: str, detail: str) -> Violation:
    return Violation(invariant=invariant, detail=detail)


def _no_gpu_twice(world: World) -> list[Violation]:
    """I1: GPU intervals of attempts never overlap."""
    spans: dict[tuple[str, int], list[tuple[int, int, JobId, int]]] = defaultdict(list)
    for a in world.attempts:
        until = a.freed_ms if a.freed_ms is not None else 1 << 62
        for gpu in a.gpus:
            spans[a.placement.node, gpu].append((a.dispatched_ms, until, a.job, a.epoch))
    found = []
    for (node, gpu), uses in spans.items():
        uses.sort()
        for first, second in pairwise(uses):
            if second[0] < first[1]:
                found.append(
                    _v("I1", f"GPU {gpu} of {node} held by jobs {first[2]} and {second[2]} at once")
                )
    return found


def _states(world: World) -> list[Violation]:
    """I2: an active job has its current attempt open; a waiting or ended one has not."""
    open_epochs = {(a.job, a.epoch) for a in world.attempts if a.ended_ms is None}
    found = []
    for job in world.jobs:
        is_open = (job.id, job.epoch) in open_epochs
        if job.state in ACTIVE and job.state is not JobState.CANCELLING and not is_open:
            found.append(_v("I2", f"job {job.id} is {job.state.value} without an open attempt"))
        if job.state not in ACTIVE and is_open:
            found.append(_v("I2", f"job {job.id} is {job.state.value} with an open attempt"))
        if job.reservation is not None and job.state not in PROMOTED_WAIT:
            found.append(_v("I2", f"job {job.id} is {job.state.value} and holds a reservation"))
    return found


def _account(world: World) -> list[Violation]:
    """I3: held = charged + written off, attempt by attempt, and no line twice."""
    found = []
    seen: Counter[tuple[JobId, int, str, int]] = Counter()
    run_ms: dict[tuple[JobId, int], int] = defaultdict(int)
    for entry in world.ledger:
        seen[entry.job, entry.epoch, entry.kind.value, entry.segment] += 1
        if entry.gpu_ms < 0:
            found.append(_v("I3", f"job {entry.job} has a negative ledger line"))
        if entry.kind is not LedgerKind.RESERVED:
            run_ms[entry.job, entry.epoch] += entry.gpu_ms
    found += [_v("I3", f"ledger line {key} was booked twice") for key, n in seen.items() if n > 1]
    for a in world.attempts:
        if a.freed_ms is None:
            if run_ms[a.job, a.epoch] and a.booked_to_ms is None:
                found.append(_v("I3", f"job {a.job}.{a.epoch} was charged while it holds GPUs"))
            continue
        held = len(a.gpus) * (a.freed_ms - a.dispatched_ms)
        if held != run_ms[a.job, a.epoch]:
            found.append(
                _v(
                    "I3",
                    f"job {a.job}.{a.epoch} held {held} GPU-ms, booked {run_ms[a.job, a.epoch]}",
                )
            )
    return found


def _epochs(world: World) -> list[Violation]:
    """I5: the newest attempt has the job's epoch; at most one completed result."""
    newest: dict[JobId, int] = defaultdict(int)
    results: Counter[JobId] = Counter()
    for a in world.attempts:
        newest[a.job] = max(newest[a.job], a.epoch)
        results[a.job] += a.outcome is not None and a.outcome.value == "completed"
    found = [
        _v("I5", f"job {job.id} has epoch {job.epoch}, its attempts {newest[job.id]}")
        for job in world.jobs
        if newest[job.id] != job.epoch
    ]
    return found + [_v("I5", f"job {j} has {n} results") for j, n in results.items() if n > 1]


def _slots(world: World, limits: Mapping[UserId, int]) -> list[Violation]:
    """I6: no user has more promoted jobs than allowed (limits as they always were)."""
    used = Counter(j.user for j in world.jobs if j.state in SLOT_STATES)
    return [
        _v("I6", f"user {user} uses {n} of {limits[user]} slots")
        for user, n in used.items()
        if user in limits and n > limits[user]
    ]


def _usage(world: World) -> list[Violation]:
    """I3: each lab's usage is what its ledger lines make, to a relative 1e-9."""
    lines: dict[str, list[LedgerEntry]] = defaultdict(list)
    for entry in world.ledger:
        if entry.kind in CHARGED:
            lines[entry.lab].append(entry)
    found = []
    for lab in world.labs:
        fresh = recomputed(lab, lines[lab.name], world.half_life_ms)
        want = decayed_micro(fresh, world.now_ms, world.half_life_ms)
        have = decayed_micro(lab, world.now_ms, world.half_life_ms)
        if abs(want - have) > 1e-9 * max(want, have, 1.0):
            found.append(_v("I3", f"lab {lab.name} shows {have:.6f}, its ledger makes {want:.6f}"))
    return found


def ids(violations: Iterable[Violation]) -> list[str]:
    """Names of the broken invariants, for terse assertions."""
    return sorted({v.invariant for v in violations})
