"""Leases this node holds, on disk: an agent that is restarted goes on where it was.

Rule: a lease is written down before its job is launched, and struck out only when the
queue has taken its last report.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dure.core.lease import Ticket
from dure.ports import LeaseKey

log = logging.getLogger("dure.agent")


class Entry(msgspec.Struct, kw_only=True):
    """One lease; times by this machine's clock."""

    ticket: Ticket
    payload: bytes
    gpus: tuple[int, ...] = ()
    started_ms: int = 0
    ended: bool = False
    """The queue has its end; only the freeing of its GPUs may be missing."""
    lost: bool = False
    """Not this node's any more: the job is being stopped, nothing it says is a result."""

    @property
    def key(self) -> LeaseKey:
        """Under which the local backend knows it."""
        return LeaseKey(job=self.ticket.job, epoch=self.ticket.epoch)


class Journal:
    """One small file a lease, replaced whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._entries: dict[LeaseKey, Entry] = {}
        for path in sorted(self._folder.glob("*.json")):
            entry = _read(path)
            if entry is not None:
                self._entries[entry.key] = entry

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, key: LeaseKey) -> Entry | None:
        """One lease, if it is held."""
        return self._entries.get(key)

    def put(self, entry: Entry) -> None:
        """Write it down; raises OSError when the disk refuses."""
        path = self._path(entry.key)
        part = path.with_suffix(".new")
        part.write_bytes(msgspec.json.encode(entry))
        part.chmod(0o600)
        part.rename(path)
        self._entries[entry.key] = entry

    def strike(self, key: LeaseKey) -> None:
        """Nothing of it is left to report."""
        self._entries.pop(key, None)
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: LeaseKey) -> Path:
        return self._folder / f"{key.job}-{key.epoch}.json"


def _read(path: Path) -> Entry | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Entry)
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("lease file %s is unreadable and left out: %s", path.name, error)
        return None
