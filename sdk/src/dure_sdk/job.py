"""Facts about this job, for training programs: its attempt, its folder, its stop, its progress.

All of it works outside of Dure, too: attempt 1, the current folder, no stop, no progress file.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from types import FrameType

PROGRESS_EVERY_S = 1.0
EXIT_STOPPED = 128 + signal.SIGTERM

_stopping = threading.Event()
_told_s = float("-inf")


def attempt() -> int:
    """1 at the first start of this job's process, one more after each restart."""
    text = os.environ.get("JOB_ATTEMPT", "")
    return int(text) if text.isdigit() else 1


def output_dir() -> Path:
    """Where results and checkpoints go; the next attempt finds there what this one left."""
    folder = Path(os.environ.get("JOB_OUTPUT_DIR") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def on_stop(save: Callable[[], Any] | None = None) -> None:
    """Be told when the job is to stop. Call it in the main thread.

    Dure sends SIGTERM and promises 30 s. With `save`, that is called once and the program then
    ends with exit code 143; without, `stopping()` turns true and the program ends by itself.
    A handler that was set before is called, too.
    """
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        if _stopping.is_set():
            return  # a second signal must not cut the checkpoint short
        _stopping.set()
        if save is not None:
            save()
        if callable(before):
            before(number, frame)
        if save is not None:
            raise SystemExit(EXIT_STOPPED)

    signal.signal(signal.SIGTERM, handle)


def stopping() -> bool:
    """Whether the job was told to stop (after `on_stop`)."""
    return _stopping.is_set()


def progress(done: float, total: float | None = None, **facts: Any) -> None:
    """Leave word of how far the job is, at most once a second; `facts` are shown beside it."""
    global _told_s  # noqa: PLW0603 - one job per process
    folder = os.environ.get("JOB_OUTPUT_DIR")
    now_s = time.monotonic()
    if not folder or (now_s - _told_s < PROGRESS_EVERY_S and done != total):
        return
    _told_s = now_s
    said = {"done": done, "total": total, "time_ms": int(time.time() * 1000), "facts": facts}
    try:
        place = Path(folder, ".dure")
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = place / f".progress.{os.getpid()}"
        part.write_text(json.dumps(said, default=str))
        part.replace(place / "progress.json")
    except OSError:
        pass  # a full disk is told by whoever needs it next
