"""Last words: a small file that is always current, for those who look after a rank was killed.

A rank that runs out of memory is killed with SIGKILL and can write nothing. Its node agent or the
epilog of Slurm reads this file and the counters of the cgroup named in it, and writes the verdict.
Under `srun` the other ranks of a node read it too, to leave out what their first rank shows.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the files go: an own setting, the job's output folder, else Slurm's step."""
    env = os.environ if environ is None else environ
    if env.get("DURE_LAST_WORDS_DIR"):
        return Path(env["DURE_LAST_WORDS_DIR"])
    if env.get("JOB_OUTPUT_DIR"):
        return Path(env["JOB_OUTPUT_DIR"], ".dure")
    if env.get("SLURM_JOB_ID"):
        return Path(tempfile.gettempdir(), f"dure-sdk-{os.getuid()}-{step(env)}")
    return None


def step(environ: Mapping[str, str] | None = None) -> str:
    """One launch of ranks: files of an earlier one say nothing about this one."""
    env = os.environ if environ is None else environ
    names = ("JOB_ID", "JOB_ATTEMPT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "-".join(env.get(name, "") for name in names).strip("-")


class Words:
    """The file of one rank, replaced whole at each sample."""

    def __init__(self, rank: int, fixed: Mapping[str, Any], where: Path | None = None) -> None:
        self._folder = folder() if where is None else where
        self._name = f"last-words-rank{rank}.json"
        self._fixed = {"version": 1, "rank": rank, "host": socket.gethostname(), "step": step()}
        self._fixed.update(fixed)
        self._made = False

    def write(self, now: Mapping[str, Any]) -> None:
        """Replace the file; a full or read-only disk is nobody's reason to stop."""
        if self._folder is None:
            return
        try:
            if not self._made:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._made = True
            part = self._folder / f".{self._name}.{os.getpid()}"
            part.write_text(json.dumps({**self._fixed, **now}))
            part.replace(self._folder / self._name)
        except OSError:
            self._folder = None


def first_here(where: Path | None, host: str, this_step: str) -> dict[str, Any] | None:
    """What the first rank of this node and launch has written, if it has."""
    if where is None or not where.is_dir():
        return None
    for path in where.glob("last-words-rank*.json"):
        try:
            said = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if not isinstance(said, dict):
            continue
        if said.get("local_rank") == 0 and (said.get("host"), said.get("step")) == (
            host,
            this_step,
        ):
            return said
    return None
