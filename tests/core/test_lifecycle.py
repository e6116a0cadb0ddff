"""The state machine and the maintenance gate, exhaustively: legal or refused."""

from __future__ import annotations

import pytest

from dure.core.errors import DureError, ErrorCode, IllegalTransition
from dure.core.lifecycle import TRANSITIONS, JobEvent, allowed, mermaid, step
from dure.core.maintenance import Action, dispatches, gate
from dure.core.model import ACTIVE, RETRYABLE, SLOT_STATES, TERMINAL, WAITING, JobState, Phase

S, E = JobState, JobEvent
ENDS = {E.COMPLETED: S.COMPLETED, E.FAILED: S.FAILED, E.TIMED_OUT: S.TIMED_OUT, E.DIED: S.DEAD}
LATE = {**ENDS, E.RESUMED: S.RUNNING, E.CANCELLED: S.CANCELLED, E.DEMOTED: S.PERSONAL_QUEUE_WAIT}
BACK = {E.REQUEUED: S.GLOBAL_QUEUE_WAIT, E.REQUEUED_ABSENT: S.NODE_WAIT}
AGAIN = {E.RETRIED: S.PERSONAL_QUEUE_WAIT}
WANTED: dict[JobState, dict[JobEvent, JobState]] = {
    S.PERSONAL_QUEUE_WAIT: {
        E.PROMOTED: S.GLOBAL_QUEUE_WAIT,
        E.PROMOTED_ABSENT: S.NODE_WAIT,
        E.CANCELLED: S.CANCELLED,
    },
    S.GLOBAL_QUEUE_WAIT: {
        **LATE,
        E.DISPATCHED: S.DISPATCHED,
        E.NODE_ABSENT: S.NODE_WAIT,
        E.CANCEL_ASKED: S.CANCELLING,
    },
    S.NODE_WAIT: {**LATE, E.NODE_PRESENT: S.GLOBAL_QUEUE_WAIT, E.CANCEL_ASKED: S.CANCELLING},
    S.DISPATCHED: {
        **ENDS,
        **BACK,
        E.STARTED: S.RUNNING,
        E.CANCEL_ASKED: S.CANCELLING,
        E.CANCELLED: S.CANCELLED,
    },
    S.RUNNING: {**ENDS, **BACK, E.CANCEL_ASKED: S.CANCELLING},
    S.CANCELLING: {E.CANCELLED: S.CANCELLED},
    S.COMPLETED: {},
    S.FAILED: AGAIN,
    S.TIMED_OUT: AGAIN,
    S.CANCELLED: {},
    S.DEAD: AGAIN,
}


@pytest.mark.parametrize("state", list(JobState))
@pytest.mark.parametrize("event", list(JobEvent))
def test_every_event_in_every_state_is_legal_or_refused(state, event) -> None:
    wanted = WANTED[state].get(event)
    assert allowed(state, event) is (wanted is not None)
    if wanted is not None:
        assert step(state, event) is wanted
    else:
        with pytest.raises(IllegalTransition, match=event.value):
            step(state, event)


def test_every_state_is_reached_and_only_completed_and_cancelled_are_for_good() -> None:
    reached = {after for moves in TRANSITIONS.values() for after in moves.values()}
    assert reached == set(JobState)
    assert {s for s, moves in TRANSITIONS.items() if not moves} == {S.COMPLETED, S.CANCELLED}
    assert {s for s, moves in TRANSITIONS.items() if E.RETRIED in moves} == RETRYABLE


def test_the_groups_of_states_say_what_policy_2_says() -> None:
    assert {S.GLOBAL_QUEUE_WAIT, S.NODE_WAIT, S.DISPATCHED, S.RUNNING, S.CANCELLING} == SLOT_STATES
    assert set(JobState) == WAITING | ACTIVE | TERMINAL
    assert not (WAITING & ACTIVE or WAITING & TERMINAL or ACTIVE & TERMINAL)


def test_the_diagram_shows_every_transition() -> None:
    drawn = mermaid()
    for state, moves in TRANSITIONS.items():
        for event, after in moves.items():
            line = next(
                x for x in drawn.splitlines() if x.startswith(f"    {state.value} --> {after}:")
            )
            assert event.value in line


YES = {
    Phase.NORMAL: {Action.WORK, Action.CANCEL, Action.READ, Action.ADMIN},
    Phase.DRAINING: {Action.CANCEL, Action.READ, Action.ADMIN},
    Phase.BACKFILL_RECOVERY: {Action.READ, Action.ADMIN},
    Phase.ACTIVE: {Action.READ, Action.ADMIN},
}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("action", list(Action))
def test_the_gate_is_the_table_of_policy_8(phase, action) -> None:
    if action in YES[phase]:
        gate(phase, action)
        return
    with pytest.raises(DureError) as caught:
        gate(phase, action)
    assert caught.value.code is ErrorCode.SERVICE_MAINTENANCE
    assert caught.value.params["phase"] == phase.value


def test_the_queue_moves_in_normal_only() -> None:
    assert [p for p in Phase if dispatches(p)] == [Phase.NORMAL]
