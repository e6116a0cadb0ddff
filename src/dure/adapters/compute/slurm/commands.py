"""Slurm's commands: always with a time limit, a clean environment, and an answer as a value.

Rule: nothing here raises because Slurm is away, slow or confused; `Answer.ok` says so.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from dure.core.model import Value

AWAY = (
    "Unable to contact",
    "Connection refused",
    "Connection timed out",
    "Connection reset",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Transport endpoint",
    "Unexpected message received",
    "temporarily unable",
    "temporarily unavailable",
    "Munge encode failed",
    "authentication error",
    "getaddrinfo",
    "Slurm backup controller",
)
"""Words of failures that say nothing about the request itself: it may be asked again."""


class Answer(Value, frozen=True, kw_only=True):
    """What a command said. `away`: the request may or may not have arrived."""

    ok: bool
    out: str = ""
    problem: str = ""
    away: bool = False
    took_s: float = 0.0


class Commands:
    """Runs Slurm's programs; safe to use from several threads."""

    def __init__(self, *, bin_dir: str = "", conf: str = "", timeout_s: float = 15.0) -> None:
        self._bin_dir = bin_dir
        self._timeout_s = timeout_s
        path = os.environ.get("PATH", os.defpath)
        self._env = {
            "PATH": f"{bin_dir}{os.pathsep}{path}" if bin_dir else path,
            "LC_ALL": "C",
            "SLURM_TIME_FORMAT": "%s",
            "HOME": "/",
        }
        found = conf or os.environ.get("SLURM_CONF", "")
        if found:
            self._env["SLURM_CONF"] = found

    def run(self, argv: Iterable[str], text: str = "") -> Answer:
        """One command; `text` goes to its standard input."""
        argv = list(argv)
        if self._bin_dir:
            argv[0] = str(Path(self._bin_dir) / argv[0])
        began = time.monotonic()
        try:
            done = subprocess.run(  # noqa: S603 - a list, no shell
                argv,
                input=text.encode(),
                env=self._env,
                cwd="/",
                capture_output=True,
                timeout=self._timeout_s,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            problem = f"{argv[0]} gave no answer in {self._timeout_s:g} s"
            return Answer(ok=False, problem=problem, away=True, took_s=self._timeout_s)
        except OSError as error:
            # Not installed or not to be executed: the request has certainly not arrived.
            problem = f"{argv[0]} cannot be run: {error.strerror}"
            return Answer(ok=False, problem=problem, away=True)
        took_s = time.monotonic() - began
        out, err = (part.decode("utf-8", "replace") for part in (done.stdout, done.stderr))
        problem = " ".join(err.split())
        away = any(words in problem for words in AWAY)
        ok = done.returncode == 0 and not away
        problem = "" if ok else problem or f"{argv[0]} ended with {done.returncode}"
        return Answer(ok=ok, out=out, problem=problem, away=away and not ok, took_s=took_s)
