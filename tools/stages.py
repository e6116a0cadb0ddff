"""Run the stages of `make test` in order and print the seconds of each.

`python tools/stages.py` runs all; names run those (`lint`, `core`, …). The first stage that
fails ends the run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
TRACK = ROOT / ".venv-track" / "bin" / "python"

PYTEST = [str(BIN / "python"), "-m", "pytest"]
STAGES: dict[str, list[list[str]]] = {
    "lint": [
        [str(BIN / "ruff"), "format", "--check", "."],
        [str(BIN / "ruff"), "check", "."],
        [str(BIN / "mypy")],
        [str(BIN / "lint-imports"), "--no-cache"],
    ],
    "tidy": [[*PYTEST, "tests/tidy"]],
    "core": [
        [
            str(BIN / "coverage"),
            "run",
            "--branch",
            "--source=src/dure/core",
            "-m",
            "pytest",
            "tests/core",
        ],
        [str(BIN / "coverage"), "report", "--skip-covered", "--fail-under=93"],
    ],
    "sim": [[*PYTEST, "-n", "2", "tests/sim"]],
    "engine": [[*PYTEST, "-n", "2", "tests/engine"]],
    "contract": [[*PYTEST, "-n", "2", "tests/contract", "tests/agent"]],
    "lease": [[*PYTEST, "-n", "2", "tests/lease"]],
    # They wait for nodes that have gone, mostly: more at a time than there are cores.
    "edge": [[*PYTEST, "-n", "4", "tests/edge"]],
    "jail": [[*PYTEST, "-n", "2", "tests/jail"]],
    "api": [[*PYTEST, "-n", "2", "tests/api", "tests/cli"]],
    # In an environment of its own: MLflow and what it brings are no business of the server.
    "sdk": [
        [str(TRACK), "-m", "pytest", "-n", "2", "--dist", "loadgroup", "tests/sdk"],
        [str(BIN / "python"), "tools/mlflow_matrix.py", "run"],
    ],
    "slurm": [[*PYTEST, "-n", "2", "tests/slurm"]],
    "e2e": [[*PYTEST, "tests/e2e"]],
}


def main() -> int:
    """Run the named stages, or all; exit with the first failure's code."""
    names = sys.argv[1:] or list(STAGES)
    took: list[tuple[str, float]] = []
    code = 0
    for name in names:
        began = time.monotonic()
        for command in STAGES[name]:
            print(f"== {name}: {Path(command[0]).name} {' '.join(command[1:])}", flush=True)
            code = code or subprocess.run(command, cwd=ROOT, check=False).returncode
        took.append((name, time.monotonic() - began))
        if code:
            break
    print("\nseconds per stage: " + ", ".join(f"{n} {s:.0f}" for n, s in took))
    if code:
        print(f"stage {took[-1][0]} failed (exit {code})")
    return code


if __name__ == "__main__":
    sys.exit(main())
