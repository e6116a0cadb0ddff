"""Run the contract test of the SDK on several versions of MLflow's client.

`python tools/mlflow_matrix.py make` makes one small environment per version in .cache/mlflow,
`run` runs tests/sdk/test_mlflow_contract.py in each that is there and says which are not.
The server is that of .venv-track: what is leaned on is the client and the REST API.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".cache" / "mlflow"
TRACK = ROOT / ".venv-track" / "bin" / "python"
OLDEST = "3.15.1"
"""The oldest MLflow that the SDK supports."""
BESIDE = ("psutil", "nvidia-ml-py", "pytest", "pytest-timeout", "pytest-randomly")


def locked() -> str:
    """The version that all other tests of the SDK use."""
    text = (ROOT / "requirements" / "track.txt").read_text()
    found = re.search(r"^mlflow==([\d.]+)", text, re.MULTILINE)
    assert found
    return found.group(1)


def newest() -> str:
    """The newest that can be installed: a wheel of mlflow without its mlflow-skinny is none."""
    ask = [sys.executable, "-m", "pip", "index", "versions", "mlflow-skinny"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    found = re.search(r"\(([\d.]+)\)", done.stdout)
    return found.group(1) if found else locked()


def made() -> list[str]:
    """Versions whose environment is whole."""
    return sorted(p.parent.name for p in PLACE.glob("*/.made"))


def make() -> int:
    """Make what is missing."""
    for version in dict.fromkeys((OLDEST, locked(), newest())):
        folder = PLACE / version
        if (folder / ".made").exists():
            continue
        print(f"making an environment for MLflow {version}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"mlflow-skinny=={version}", *BESIDE], check=True)
        (folder / ".made").touch()
    return 0


def run() -> int:
    """Test every version that is there; the locked one was tested with all the rest."""
    code = 0
    versions = [v for v in made() if v != locked()]
    for version in versions:
        python = PLACE / version / "bin" / "python"
        print(f"== MLflow {version}", flush=True)
        env = {**os.environ, "DURE_TEST_MLFLOW_PYTHON": str(TRACK)}
        env["PYTHONPATH"] = str(ROOT / "sdk" / "src")
        test = "tests/sdk/test_mlflow_contract.py"
        done = subprocess.run([python, "-m", "pytest", test], cwd=ROOT, env=env, check=False)
        code = code or done.returncode
    if OLDEST not in versions:
        print(
            f"MLflow contract: tested with {', '.join([locked(), *versions])} only; "
            f"`python tools/mlflow_matrix.py make` brings {OLDEST} and the newest"
        )
    return code


if __name__ == "__main__":
    sys.exit({"make": make, "run": run}[sys.argv[1] if len(sys.argv) > 1 else "run"]())
