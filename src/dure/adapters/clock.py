"""Time: the system's, made monotone, and one that tests move by hand."""

from __future__ import annotations

import secrets
import threading
import time


class SystemClock:
    """Wall time that never goes back.

    Between readings it follows CLOCK_BOOTTIME (which counts suspend); a wall clock that
    was set forward is followed, one that was set back is not.
    """

    def __init__(self, not_before_ms: int = 0) -> None:
        self._lock = threading.Lock()
        self._boot_ms = self._boottime_ms()
        self._now_ms = max(time.time_ns() // 1_000_000, not_before_ms)

    @staticmethod
    def _boottime_ms() -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch, never less than before."""
        with self._lock:
            boot_ms = self._boottime_ms()
            passed = self._now_ms + max(0, boot_ms - self._boot_ms)
            self._boot_ms = boot_ms
            wall_ms = time.time_ns() // 1_000_000
            # A second of lead is drift or a step forward: follow it at once.
            self._now_ms = wall_ms if wall_ms > passed + 1000 else passed
            return self._now_ms


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """The time it was set to."""
        return self._now_ms

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`."""
        self._now_ms += round(seconds * 1000)

    def set_ms(self, now_ms: int) -> None:
        """Jump to a time; going back is allowed here, to test what must bear it."""
        self._now_ms = now_ms


class SystemIds:
    """Secrets from the operating system."""

    def token(self) -> str:
        """192 bits, URL-safe."""
        return secrets.token_urlsafe(24)
