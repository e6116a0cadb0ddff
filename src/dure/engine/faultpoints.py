"""Named places at which a test may kill the process; nothing in production.

Write-ahead is only worth something if every gap between two acts has been died in.
"""

from __future__ import annotations

from collections.abc import Callable

USE_CASES = ("submit", "cancel", "hold", "release", "retry", "edit", "reorder", "admin")
POINTS = (
    *(f"{case}.{side}_commit" for case in USE_CASES for side in ("before", "after")),
    "cancel.after_stop",
    "lend.before_commit",
    "lend.after_commit",
    "presence.before_commit",
    "presence.after_commit",
    "dispatch.before_commit",
    "dispatch.after_commit",
    "dispatch.after_launch",
    "record.before_commit",
    "record.after_commit",
    "reconcile.before_commit",
    "reconcile.after_commit",
)

_hook: Callable[[str], None] | None = None


def install(hook: Callable[[str], None] | None) -> None:
    """Set what is called at each point; None removes it."""
    global _hook  # noqa: PLW0603 - one process-wide switch, tests only
    _hook = hook


def reached(point: str) -> None:
    """Tell the hook, if any, that `point` was reached."""
    if _hook is not None:
        _hook(point)
