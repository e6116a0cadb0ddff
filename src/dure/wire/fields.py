"""What all structs of the API share: bases, and field types with their limits."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

NO_NUL = r"^[^\x00]*$"
CODE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$(?!\n)"
"""Python's `$` also matches before a last line feed, JSON Schema's does not."""

Code = Annotated[str, Meta(pattern=CODE, description="letters, digits, '.', '_', '-'; at most 63")]
ShortText = Annotated[str, Meta(max_length=200, pattern=NO_NUL)]
Argument = Annotated[str, Meta(max_length=131_072, pattern=NO_NUL)]
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$(?!\n)")]
LabelName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$(?!\n)")]
Gigabytes = Annotated[float, Meta(ge=0, le=10_000)]
TimeMs = Annotated[int, Meta(ge=0, le=253_402_300_799_000)]
JobNumber = Annotated[int, Meta(ge=1, le=9_223_372_036_854_775_807)]
Param = str | int | float | bool | None


class In(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of request bodies: a misspelt field is refused, not ignored."""


class Out(msgspec.Struct, frozen=True, kw_only=True):
    """Base of responses."""
