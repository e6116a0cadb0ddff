"""The surroundings of one process: time, names, somebody to tell."""

from __future__ import annotations

from typing import Protocol

from dure.core.events import Event


class Clock(Protocol):
    """The one source of time; tests drive it by hand."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch; never less than an earlier answer."""
        ...


class Ids(Protocol):
    """Random names that nobody can guess."""

    def token(self) -> str:
        """A fresh secret with at least 128 bits of randomness."""
        ...


class Notifier(Protocol):
    """Somebody to tell. Calls never raise into the engine."""

    def notify(self, event: Event) -> None:
        """Tell about one committed event."""
        ...
