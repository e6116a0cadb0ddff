"""Runs at the start of every Python process of a job, then whichever one it stands before."""
# ruff: noqa: PTH100, PTH120, INP001 - starts with every Python process of a job

import os
import sys

import dure_uncaught  # type: ignore[import-not-found] # beside this file, not in a package

dure_uncaught.install()


def go_on() -> None:
    """Import the `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    kept = sys.path[:]
    me = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [p for p in kept if os.path.abspath(p or ".") != here]
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401, PLC0415 - found further down the path now
    except ImportError:
        if me is not None:
            sys.modules["sitecustomize"] = me
    finally:
        sys.path[:] = kept


go_on()
