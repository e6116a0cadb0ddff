"""The gate of policy 8: what each phase lets through."""

from __future__ import annotations

from enum import StrEnum

from dure.core.errors import DureError, ErrorCode
from dure.core.model import Phase


class Action(StrEnum):
    """Kinds of request that maintenance treats differently."""

    WORK = "work"
    """submit, retry, rerun, release, hold, reorder, PATCH of a job, builds"""
    CANCEL = "cancel"
    READ = "read"
    ADMIN = "admin"


ALLOWED: dict[Phase, frozenset[Action]] = {
    Phase.NORMAL: frozenset(Action),
    Phase.DRAINING: frozenset({Action.CANCEL, Action.READ, Action.ADMIN}),
    Phase.BACKFILL_RECOVERY: frozenset({Action.READ, Action.ADMIN}),
    Phase.ACTIVE: frozenset({Action.READ, Action.ADMIN}),
}


def gate(phase: Phase, action: Action) -> None:
    """Raise SERVICE_MAINTENANCE when `phase` does not let `action` through."""
    if action not in ALLOWED[phase]:
        raise DureError(ErrorCode.SERVICE_MAINTENANCE, phase=phase.value)


def dispatches(phase: Phase) -> bool:
    """Whether the queue moves."""
    return phase is Phase.NORMAL
