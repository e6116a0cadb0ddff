"""Writes an exception that ends a Python process into the folder DURE_UNCAUGHT names.

Installed by the `sitecustomize` beside it, in every Python process of a job. It costs some
microseconds at start, changes nothing that is printed, and never raises. Any Python 3.
"""
# ruff: noqa: PTH118, PTH123, INP001, SIM105 - starts with every Python process of a job

import os
import sys

LONGEST = 4000
WRITING = (OSError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError)
"""What may go wrong while writing it down: the traceback must be printed all the same."""


def chain(error: "BaseException | None") -> "list[str]":
    """`type: message` of an exception and of what it came from, the first cause first."""
    seen = []  # type: list[BaseException]
    while error is not None and all(error is not e for e in seen) and len(seen) < 8:
        seen.append(error)
        shown = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or shown
    return [named(e) for e in reversed(seen)]


def named(error: BaseException) -> str:
    """`module.Type: message`; a kind of MemoryError under its own name says that it is one."""
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else kind.__module__ + "."
    words = module + kind.__qualname__ + ": " + str(error)[:LONGEST]
    own = isinstance(error, MemoryError) and "OutOfMemory" not in kind.__name__
    return "MemoryError: " + words if own and kind is not MemoryError else words


def record(error: BaseException, folder: str) -> None:
    """Write it down; a full disk or a closed folder is not the job's concern."""
    import json  # noqa: PLC0415 - only a process that fails pays for it
    import time  # noqa: PLC0415 - as above

    value = {"at": time.time(), "pid": os.getpid(), "rank": os.environ.get("RANK", "")}
    value["chain"] = chain(error)
    with open(os.path.join(folder, str(os.getpid()) + ".json"), "w", encoding="ascii") as file:
        json.dump(value, file)


def install() -> None:
    """Come before the hook that is there; what it prints stays as it was."""
    folder = os.environ.get("DURE_UNCAUGHT")
    if not folder:
        return
    before = sys.excepthook

    def hook(kind, error, trace):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - typing is too slow to import here
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            try:
                record(error, folder)
            except WRITING:
                pass
        before(kind, error, trace)

    sys.excepthook = hook
