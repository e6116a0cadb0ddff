"""The job's state machine.

Rule: this table is the only place that names a (from, to) pair. The diagram in the docs
and the exhaustive test are made from it.
"""

from __future__ import annotations

from enum import StrEnum

from dure.core.errors import IllegalTransition
from dure.core.model import JobState as S


class JobEvent(StrEnum):
    """Everything that can move a job from one state to another."""

    PROMOTED = "promoted"
    PROMOTED_ABSENT = "promoted_absent"
    NODE_ABSENT = "node_absent"
    NODE_PRESENT = "node_present"
    DEMOTED = "demoted"
    DISPATCHED = "dispatched"
    STARTED = "started"
    RESUMED = "resumed"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    REQUEUED = "requeued"
    REQUEUED_ABSENT = "requeued_absent"
    DIED = "died"
    CANCEL_ASKED = "cancel_asked"
    CANCELLED = "cancelled"
    RETRIED = "retried"


E = JobEvent

_ENDS = {E.COMPLETED: S.COMPLETED, E.FAILED: S.FAILED, E.TIMED_OUT: S.TIMED_OUT}
_LATE = {**_ENDS, E.RESUMED: S.RUNNING, E.DIED: S.DEAD}
"""A late result of the current lease, or its return, is accepted while the job waits."""
_LIVE = {
    **_ENDS,
    E.REQUEUED: S.GLOBAL_QUEUE_WAIT,
    E.REQUEUED_ABSENT: S.NODE_WAIT,
    E.DIED: S.DEAD,
    E.CANCEL_ASKED: S.CANCELLING,
}

TRANSITIONS: dict[S, dict[JobEvent, S]] = {
    S.PERSONAL_QUEUE_WAIT: {
        E.PROMOTED: S.GLOBAL_QUEUE_WAIT,
        E.PROMOTED_ABSENT: S.NODE_WAIT,
        E.CANCELLED: S.CANCELLED,
    },
    S.GLOBAL_QUEUE_WAIT: {
        **_LATE,
        E.DISPATCHED: S.DISPATCHED,
        E.NODE_ABSENT: S.NODE_WAIT,
        E.DEMOTED: S.PERSONAL_QUEUE_WAIT,
        E.CANCEL_ASKED: S.CANCELLING,
        E.CANCELLED: S.CANCELLED,
    },
    S.NODE_WAIT: {
        **_LATE,
        E.NODE_PRESENT: S.GLOBAL_QUEUE_WAIT,
        E.DEMOTED: S.PERSONAL_QUEUE_WAIT,
        E.CANCEL_ASKED: S.CANCELLING,
        E.CANCELLED: S.CANCELLED,
    },
    S.DISPATCHED: {**_LIVE, E.STARTED: S.RUNNING, E.CANCELLED: S.CANCELLED},
    S.RUNNING: dict(_LIVE),
    S.CANCELLING: {E.CANCELLED: S.CANCELLED},
    S.COMPLETED: {},
    S.FAILED: {E.RETRIED: S.PERSONAL_QUEUE_WAIT},
    S.TIMED_OUT: {E.RETRIED: S.PERSONAL_QUEUE_WAIT},
    S.CANCELLED: {},
    S.DEAD: {E.RETRIED: S.PERSONAL_QUEUE_WAIT},
}


def step(state: S, event: JobEvent) -> S:
    """Return the state after `event`; raise `IllegalTransition` if the table forbids it."""
    after = TRANSITIONS[state].get(event)
    if after is None:
        raise IllegalTransition(state.value, event.value)
    return after


def allowed(state: S, event: JobEvent) -> bool:
    """Whether `event` may happen in `state`."""
    return event in TRANSITIONS[state]


def mermaid() -> str:
    """Draw the table as a Mermaid state diagram, for docs/concepts/states.md."""
    lines = ["stateDiagram-v2", "    [*] --> PERSONAL_QUEUE_WAIT"]
    for state, moves in TRANSITIONS.items():
        by_target: dict[S, list[str]] = {}
        for event, target in moves.items():
            by_target.setdefault(target, []).append(event.value)
        lines += [f"    {state.value} --> {t.value}: {', '.join(e)}" for t, e in by_target.items()]
        if not moves or state in (S.FAILED, S.TIMED_OUT, S.DEAD):
            lines.append(f"    {state.value} --> [*]")
    return "\n".join(lines) + "\n"
