"""Stable codes of everything that can be refused or fail.

Rule: core and engine raise `DureError`; only `api.problems` knows HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

Param = str | int | float | None | Sequence[Mapping[str, object]] | Sequence[str]


class ErrorCode(StrEnum):
    """One name per kind of refusal; names never change, sentences may."""

    INVALID_REQUEST = "INVALID_REQUEST"
    NO_FIT_PLACEMENT = "NO_FIT_PLACEMENT"
    TIME_LIMIT_TOO_LONG = "TIME_LIMIT_TOO_LONG"
    GPU_LIMIT = "GPU_LIMIT"
    QUEUE_LIMIT = "QUEUE_LIMIT"
    NOT_FOUND = "NOT_FOUND"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    FORBIDDEN = "FORBIDDEN"
    WRONG_STATE = "WRONG_STATE"
    ALREADY_ENDED = "ALREADY_ENDED"
    IDEMPOTENCY_MISMATCH = "IDEMPOTENCY_MISMATCH"
    IDEMPOTENCY_IN_FLIGHT = "IDEMPOTENCY_IN_FLIGHT"
    PRECONDITION_REQUIRED = "PRECONDITION_REQUIRED"
    STALE_EDIT = "STALE_EDIT"
    SERVICE_MAINTENANCE = "SERVICE_MAINTENANCE"
    RATE_LIMITED = "RATE_LIMITED"
    TOO_LARGE = "TOO_LARGE"
    IN_USE = "IN_USE"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    UNSUPPORTED_MEDIA_TYPE = "UNSUPPORTED_MEDIA_TYPE"
    BAD_SETTING = "BAD_SETTING"
    STORE_FAILED = "STORE_FAILED"
    INTERNAL = "INTERNAL"


class DureError(Exception):
    """A refusal with a stable code and the numbers its sentence needs."""

    def __init__(self, code: ErrorCode, **params: Param) -> None:
        super().__init__(code)
        self.code = code
        self.params = params

    def __str__(self) -> str:
        """Code and parameters, for logs; people read the catalogue's sentence."""
        shown = ", ".join(f"{k}={v}" for k, v in self.params.items())
        return f"{self.code.value}({shown})"


class IllegalTransition(Exception):  # noqa: N818 - a state machine's own word for it
    """An event that the lifecycle table does not allow; refused and logged."""

    def __init__(self, state: str, event: str) -> None:
        super().__init__(f"{event} is not allowed in {state}")
        self.state = state
        self.event = event
