"""Changing part of a thing: what is there, with what was given laid over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
import msgspec

from dure import wire
from dure.client import ApiError

S = TypeVar("S", bound=msgspec.Struct)


def existing(look: Callable[[], S]) -> S | None:
    """Return what is there, or None."""
    try:
        return look()
    except ApiError as error:
        if error.status == 404:
            return None
        raise


def merged(
    old: msgspec.Struct | None, given: Mapping[str, Any], kind: type[msgspec.Struct]
) -> dict[str, Any]:
    """Fields of a PUT: those of `old` that `kind` has, and over them what is not None."""
    names = set(kind.__struct_fields__)
    kept: dict[str, Any] = msgspec.to_builtins(old) if old is not None else {}
    whole = {k: v for k, v in kept.items() if k in names}
    return whole | {k: v for k, v in given.items() if v is not None and k in names}


def checked(fields: Mapping[str, Any], kind: type[S]) -> S:
    """Build the body; what is out of range is a usage error."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise click.UsageError(str(error)) from None


_LIMITS = [
    click.option("--slots", metavar="N", help="jobs promoted at a time per user; `none`"),
    click.option("--limit-gpus", metavar="N", help="most GPUs a job; `none`"),
    click.option("--waiting", metavar="N", help="most waiting jobs per user; `none`"),
    click.option("--max-time", metavar="TIME", help="longest time limit; `none`"),
]


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of narrower limits."""
    for option in reversed(_LIMITS):
        command = option(command)
    return command


def limits(old: wire.LimitsIn | None, given: dict[str, Any]) -> wire.LimitsIn:
    """Cut the limits' flags out of `given` and lay them over the old ones."""
    from dure.client.quantities import seconds  # noqa: PLC0415

    fields: dict[str, Any] = msgspec.to_builtins(old or wire.LimitsIn())
    names: dict[str, tuple[str, Callable[[str], int]]] = {
        "slots": ("slots", int),
        "limit_gpus": ("num_gpus", int),
        "waiting": ("waiting", int),
        "max_time": ("max_time_limit_s", seconds),
    }
    for flag, (field, read) in names.items():
        text = given.pop(flag)
        if text is None:
            continue
        try:
            fields[field] = None if text == "none" else read(text)
        except ValueError as error:
            raise click.UsageError(f"--{flag.replace('_', '-')}: {error}") from None
    return checked(fields, wire.LimitsIn)


def limits_text(limited: wire.LimitsIn) -> str:
    """Limits in one cell: `slots=2 num_gpus=4`."""
    fields: dict[str, int | None] = msgspec.to_builtins(limited)
    return " ".join(f"{k}={v}" for k, v in fields.items() if v is not None)
