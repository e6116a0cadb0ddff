"""Exceptions that nobody caught, as the job's processes wrote them down (`boot/sitecustomize`).

Rule: standard library only, syntax of Python 3.9. The text that `collect` returns is what
`core.oom` reads: blocks with an empty line between them, each headed `[main]`, `[rank N]` or
`[other]`, oldest first, one `type: message` a line, the first cause first.
"""
# ruff: noqa: PTH118 - pathlib costs time at each start

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Record = dict[str, Any]

RECORDS = "/tmp/.dure-uncaught"  # noqa: S108 - the jail's own /tmp, seen by this job alone
MOST_RECORDS = 64
MOST_BYTES = 16_384


def collect(folder: str, main: int) -> str:
    """All records of `folder` as text; `main` is the process id of the job's command."""
    found: list[Record] = []
    try:
        names = sorted(os.listdir(folder))[:MOST_RECORDS]  # noqa: PTH208 - see above
    except OSError:
        return ""
    for name in names:
        record = _read(os.path.join(folder, name))
        if record is not None:
            found.append(record)
    found.sort(key=lambda record: float(record["at"]))
    return "\n\n".join(_block(record, main) for record in found)[-MOST_BYTES:]


def _read(path: str) -> Record | None:
    """One record; the job may write anything there, so nothing is believed of its shape."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            record = json.loads(file.read(MOST_BYTES))
        return {
            "at": float(record["at"]),
            "pid": int(record["pid"]),
            "rank": str(record["rank"])[:8],
            "chain": [str(line)[:4000] for line in record["chain"]][-8:],
        }
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _block(record: Record, main: int) -> str:
    rank = record["rank"]
    head = "main" if record["pid"] == main else f"rank {rank}" if rank.isdigit() else "other"
    # An empty line would end the block.
    lines = [" | ".join(filter(None, map(str.strip, str(x).splitlines()))) for x in record["chain"]]
    return "\n".join([f"[{head}]", *filter(None, lines)])
