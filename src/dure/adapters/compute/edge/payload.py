"""What travels through the queue: orders to the agent, results back."""

from __future__ import annotations

import msgspec

from dure.core.model import Evidence
from dure.ports import LaunchOrder

INLINE_BYTES = 256 * 1024
"""Largest order or result in the queue; larger things go by file."""


class EdgeResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended, with the end of its log where no storage is shared."""

    evidence: Evidence
    log: bytes = b""
    log_cut: int = 0
    """Bytes of the log that are missing before `log`."""


def encode_order(order: LaunchOrder) -> bytes:
    """An order as the task's payload."""
    return msgspec.json.encode(order)


def decode_order(payload: bytes) -> LaunchOrder | None:
    """An order from a payload; None: not one that this version can read."""
    try:
        return msgspec.json.decode(payload, type=LaunchOrder)
    except msgspec.MsgspecError:
        return None


def encode_result(evidence: Evidence, log: bytes, log_size: int) -> bytes:
    """A result that fits: of a long log only the end."""
    room = max(0, (INLINE_BYTES - 32 * 1024) * 3 // 4)
    kept = log[-room:]
    return msgspec.json.encode(
        EdgeResult(evidence=evidence, log=kept, log_cut=max(0, log_size - len(kept)))
    )


def decode_result(result: bytes) -> EdgeResult:
    """A result; what cannot be read is told as such, never guessed."""
    try:
        return msgspec.json.decode(result, type=EdgeResult)
    except msgspec.MsgspecError:
        return EdgeResult(evidence=Evidence(stderr_tail="dure: the node's result is unreadable"))
