"""A job as a plain process of the server's own user: for a machine with one user only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import dure
from dure.adapters.runtime import environment
from dure.ports import Grant, LaunchOrder, RuntimeCommand

INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""All that a job sees of the server's environment: tokens and passwords stay behind."""
DEFAULTS = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8"}
UNCAUGHT = "uncaught"
"""Folder of exception records in the run directory; the supervisor makes and reads it."""


class ProcessRuntime:
    """No confinement; `environ` (default: the server's) is what `INHERITED` is taken from."""

    name = "process"
    confines = False

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        inherited = {k: v for k, v in environ.items() if k in INHERITED and v}
        self._base = {**DEFAULTS, **inherited}
        self._package = str(Path(dure.__file__).resolve().parent)

    def command(self, order: LaunchOrder, grant: Grant) -> RuntimeCommand:
        """The user's command; the user's variables never override the job's own."""
        env = environment.of_job(
            self._base,
            order,
            grant,
            package=self._package,
            uncaught=f"{grant.run_dir}/{UNCAUGHT}",
        )
        return RuntimeCommand(argv=order.command, env=env, cwd=order.workdir)
