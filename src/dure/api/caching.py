"""ETags: polling that costs nothing while nothing happens, and edits that lose nothing.

Rule: the tag of something that an administrator edits has two parts, `"EDIT-STATE"`. The
first changes with what can be edited, the second with all that is shown. If-Match looks at
the first alone, so an edit does not go stale because use decays or a job starts.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from dure.core.errors import DureError, ErrorCode
from dure.core.model import Lab, Node, Tier, User

_VOLATILE = re.compile(
    rb'"(?:as_of_ms|cycle|waited_s)":\d+|"(?:lab_)?usage_tflop_s":"[^"]*"',
)
"""What changes because time passes. Quotes inside a JSON string are escaped, so a job's
name cannot look like one of these."""


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\x00".join(parts)).hexdigest()[:20]


def weak(body: bytes, stamp: object = None) -> str:
    """Tag of a view: unchanged while only time has passed.

    `stamp` is what stands behind numbers that decay.
    """
    return f'W/"{_hash(_VOLATILE.sub(b"", body), msgspec.json.encode(stamp))}"'


def strong(edit: str, body: bytes) -> str:
    """Tag of something that can be edited."""
    return f'"{edit}-{_hash(body)}"'


def edit_tag(value: Tier | Node | Lab | User) -> str:
    """First part of the tag: a digest of what an administrator edits."""
    match value:
        case Lab():
            edited: object = [value.name, value.title, value.weight, value.limits]
        case Node():
            edited = [value.name, value.drained, value.drain_reason]
        case _:
            edited = value
    return _hash(msgspec.json.encode(edited))


def not_modified(if_none_match: str, tag: str) -> bool:
    """Whether the caller has this representation already (weak comparison)."""
    if if_none_match.strip() == "*":
        return True
    return _opaque(tag) in {_opaque(t) for t in if_none_match.split(",")}


def _opaque(tag: str) -> str:
    return tag.strip().removeprefix("W/")


class Expectation:
    """What the author of an edit saw: If-Match and If-None-Match of a write."""

    def __init__(self, if_match: str, if_none_match: str) -> None:
        self._match = if_match.strip()
        self._new_only = if_none_match.strip() == "*"

    def check(self, stored: Tier | Node | Lab | User | None) -> None:
        """Raise PRECONDITION_REQUIRED or STALE_EDIT unless the edit fits what is stored."""
        if stored is None:
            if self._match:
                raise DureError(ErrorCode.STALE_EDIT)
            return
        if self._new_only:
            raise DureError(ErrorCode.STALE_EDIT)
        if not self._match:
            raise DureError(ErrorCode.PRECONDITION_REQUIRED)
        seen = {_opaque(t).strip('"').partition("-")[0] for t in self._match.split(",")}
        if self._match != "*" and edit_tag(stored) not in seen:
            raise DureError(ErrorCode.STALE_EDIT)
