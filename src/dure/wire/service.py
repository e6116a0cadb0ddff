"""Health, maintenance and problem details."""

from __future__ import annotations

from dure.core.model import Phase
from dure.wire.fields import In, Out, Param


class HealthOut(Out, frozen=True, kw_only=True):
    """GET /healthz."""

    status: str
    version: str
    as_of_ms: int


class MaintenanceOut(Out, frozen=True, kw_only=True):
    """GET /v1/maintenance/status; needs no login."""

    phase: Phase


class MaintenanceIn(In, frozen=True, kw_only=True):
    """PUT /v1/maintenance."""

    phase: Phase


class FieldError(Out, frozen=True, kw_only=True):
    """Where something is wrong, and what: a JSON pointer into the body, `?name` or `Header:`."""

    pointer: str
    detail: str


class Problem(Out, frozen=True, kw_only=True):
    """RFC 9457 problem details; `code` is stable, `detail` is for people."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str = ""
    trace_id: str = ""
    errors: list[FieldError] = []
    params: dict[str, Param] = {}
    nearest_placement: dict[str, str] | None = None
    failed_constraint: str | None = None
    nearest_requests: list[dict[str, Param]] = []
