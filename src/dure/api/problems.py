"""Every refusal as RFC 9457 problem details. The only module that maps codes to HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from litestar.exceptions import HTTPException

from dure.core.errors import DureError, ErrorCode
from dure.core.messages import ERRORS, say
from dure.wire import FieldError, Param, Problem

MEDIA_TYPE = "application/problem+json"
C = ErrorCode
STATUS: dict[ErrorCode, int] = {
    C.INVALID_REQUEST: 422,
    C.NO_FIT_PLACEMENT: 422,
    C.TIME_LIMIT_TOO_LONG: 422,
    C.GPU_LIMIT: 422,
    C.QUEUE_LIMIT: 429,
    C.NOT_FOUND: 404,
    C.UNAUTHENTICATED: 401,
    C.FORBIDDEN: 403,
    C.WRONG_STATE: 409,
    C.ALREADY_ENDED: 409,
    C.IDEMPOTENCY_MISMATCH: 422,
    C.IDEMPOTENCY_IN_FLIGHT: 409,
    C.PRECONDITION_REQUIRED: 428,
    C.STALE_EDIT: 412,
    C.SERVICE_MAINTENANCE: 503,
    C.RATE_LIMITED: 429,
    C.TOO_LARGE: 413,
    C.IN_USE: 409,
    C.METHOD_NOT_ALLOWED: 405,
    C.UNSUPPORTED_MEDIA_TYPE: 415,
    C.BAD_SETTING: 500,
    C.STORE_FAILED: 503,
    C.INTERNAL: 500,
}
_OWN_FIELDS = {
    "nearest_node",
    "nearest_tier",
    "failed_constraint",
    "nearest_requests",
    "field",
    "problem",
}
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"(?:unknown field|missing required field) `(.*)`$", re.DOTALL)


class Unreadable(Exception):  # noqa: N818 - says what is so
    """A body, query or header that cannot be taken: 400 if malformed, 422 if not valid."""

    def __init__(self, status: int, errors: list[FieldError]) -> None:
        super().__init__(errors)
        self.status = status
        self.errors = errors


def unreadable(error: Exception, where: str = "") -> Unreadable:
    """Turn a decoder's complaint into pointers; `where` is `?` for a query."""
    if isinstance(error, msgspec.ValidationError):
        return Unreadable(422, [field_error(str(error), where)])
    detail = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return Unreadable(400, [FieldError(pointer=where, detail=detail)])


def field_error(message: str, where: str = "") -> FieldError:
    """Find the place that msgspec names at the end of its message, as a JSON pointer."""
    found = _PLACE.match(message)
    assert found is not None, "the pattern matches any text"
    steps = re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", found["path"] or "")
    names = [name or index for name, index in steps]
    if "..." in names:
        # msgspec does not say which key; the mapping is as near as it gets.
        names = names[: names.index("...")]
    if named := _NAMED.search(found["what"]):
        names.append(named[1])
    escaped = [n.replace("~", "~0").replace("/", "~1") for n in names]
    if where:
        return FieldError(pointer=where + ".".join(names[:1]), detail=found["what"])
    return FieldError(pointer="".join(f"/{n}" for n in escaped), detail=found["what"])


def of_exception(error: Exception, path: str, body_kib: int) -> tuple[DureError, Unreadable | None]:
    """Find the code of whatever was raised, with the pointers it has."""
    if isinstance(error, DureError):
        field = error.params.get("field")
        if error.code is not C.INVALID_REQUEST or not isinstance(field, str):
            return error, None
        pointer = field if field.startswith("?") else f"/{field}"
        detail = str(error.params.get("problem", "not valid")).replace("_", " ")
        return error, Unreadable(422, [FieldError(pointer=pointer, detail=detail)])
    if isinstance(error, Unreadable):
        return DureError(C.INVALID_REQUEST), error
    if isinstance(error, HTTPException):
        return _of_status(error.status_code, path, body_kib)
    return DureError(C.INTERNAL), None


def _of_status(status: int, path: str, body_kib: int) -> tuple[DureError, Unreadable | None]:
    known = {
        404: DureError(C.NOT_FOUND, kind="path", id=path[:200]),
        405: DureError(C.METHOD_NOT_ALLOWED),
        413: DureError(C.TOO_LARGE, limit_kib=body_kib),
        415: DureError(C.UNSUPPORTED_MEDIA_TYPE),
    }
    if status in known:
        return known[status], None
    if status >= 500:
        return DureError(C.INTERNAL), None
    return DureError(C.INVALID_REQUEST), Unreadable(status, [])


def problem(error: DureError, found: Unreadable | None, lang: str, trace_id: str) -> Problem:
    """Build the document, with its sentence in the reader's language."""
    code = error.code
    sentence, hint = ERRORS[code]
    params = error.params
    node, tier = params.get("nearest_node"), params.get("nearest_tier")
    failed = params.get("failed_constraint")
    nearest = params.get("nearest_requests")
    return Problem(
        type=f"/problems/{code.value}",
        title=code.value.replace("_", " ").capitalize(),
        status=found.status if found is not None else STATUS[code],
        detail=say(sentence, lang, params),
        code=code.value,
        hint=say(hint, lang, params),
        trace_id=trace_id,
        errors=found.errors if found is not None else [],
        params=_plain(params),
        nearest_placement={"node": str(node), "tier": str(tier)} if node and tier else None,
        failed_constraint=str(failed) if failed else None,
        nearest_requests=[
            {k: v for k, v in one.items() if isinstance(v, str | int | float)}
            for one in (nearest if isinstance(nearest, list | tuple) else ())
            if isinstance(one, Mapping)
        ],
    )


def _plain(params: Mapping[str, object]) -> dict[str, Param]:
    return {
        name: value
        for name, value in params.items()
        if name not in _OWN_FIELDS and (value is None or isinstance(value, str | int | float))
    }


def language(header: str, default: str) -> str:
    """Choose Korean or English by Accept-Language; the first of the best ones wins."""
    best, best_q = default, 0.0
    for part in header[:1000].split(","):
        name, *options = (p.strip().lower() for p in part.split(";"))
        quality = 1.0
        for option in options:
            if option.startswith("q="):
                try:
                    quality = float(option[2:])
                except ValueError:
                    quality = 0.0
        primary = name.partition("-")[0]
        if primary in {"ko", "en"} and best_q < quality <= 1:
            best, best_q = primary, quality
    return best
