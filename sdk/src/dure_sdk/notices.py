"""What the SDK tells the user: one line each, and a warning once per cause."""

from __future__ import annotations

import logging
import sys
import threading

LOGGER = logging.getLogger("dure_sdk")


def say(text: str) -> None:
    """One line of information."""
    _ready().info(text)


def warn(text: str) -> None:
    """One line that asks for attention; training goes on."""
    _ready().warning(text)


def _ready() -> logging.Logger:
    """Make the lines visible where the program has set up no logging of its own."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("dure: %(message)s"))
        LOGGER.addHandler(handler)
        # Logging set up later by the program must not print every line twice.
        LOGGER.propagate = False
    return LOGGER


class Causes:
    """Remembers what was told, so that a cause is told once and not at every sample."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def warn(self, cause: str, text: str) -> None:
        """Warn, unless this cause was told before."""
        with self._lock:
            if cause in self._told:
                return
            self._told.add(cause)
        warn(text)
