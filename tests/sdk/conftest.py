"""tests/sdk runs in .venv-track, which has MLflow; `make test` makes it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HAVE_MLFLOW = importlib.util.find_spec("mlflow") is not None
ROOT = Path(__file__).resolve().parents[2]
if not HAVE_MLFLOW:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


def pytest_report_header() -> str:
    if HAVE_MLFLOW:
        return ""
    return "tests/sdk: MLflow is not in this environment; run them with .venv-track/bin/python"


def pytest_configure(config: pytest.Config) -> None:
    # MLflow's own imports warn; ours must not.
    for module in ("mlflow", "pydantic", "google", "starlette", "fastapi", "alembic"):
        config.addinivalue_line("filterwarnings", f"ignore:::{module}")
    for kind in ("DeprecationWarning", "FutureWarning", "ResourceWarning", "UserWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")


@pytest.fixture(scope="session")
def server():
    from tests.sdk.servers import MlflowServer

    made = MlflowServer()
    try:
        made.wait()
        yield made
    finally:
        made.close()


@pytest.fixture
def door(server):
    from tests.sdk.servers import Door

    made = Door(server.port)
    yield made
    made.close()


CLEARED = [
    "NODE_NAME",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "SLURM_PROCID",
    "DURE_MLFLOW_RUN_ID",
    "MLFLOW_RUN_ID",
    "MLFLOW_TRACKING_URI",
    "JOB_OUTPUT_DIR",
    "DURE_NODE_SERIES",
    "DURE_CGROUP_ROOT",
    "CUDA_VISIBLE_DEVICES",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING",
    "SLURM_JOB_ID",
    "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL",
    "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING",
]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No test sees the environment or the session of another."""
    for name in CLEARED:
        monkeypatch.delenv(name, raising=False)
    yield
    if "dure_sdk.tracking" in sys.modules:
        tracking = sys.modules["dure_sdk.tracking"]
        tracking._stop_session(1)
        tracking._owned.clear()
        tracking._attached.clear()
        tracking._prepared = None
    fluent = sys.modules.get("mlflow.tracking.fluent")
    if fluent is not None:
        fluent._active_run_stack.get().clear()
    for name in CLEARED:
        os.environ.pop(name, None)


@pytest.fixture
def python(tmp_path):
    """Run a script as a training program of its own; returns its output."""

    def run(text: str, env: dict[str, str] | None = None, limit_s: float = 60):
        path = tmp_path / f"train{len(list(tmp_path.glob('train*')))}.py"
        path.write_text(text)
        return subprocess.Popen(
            [sys.executable, str(path)],
            env={**{k: v for k, v in os.environ.items() if k not in CLEARED}, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run
