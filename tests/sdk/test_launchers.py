"""The shipped examples under real launchers: plain Python, torchrun, Ray Train."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlflow
import pytest

from tests.sdk.conftest import CLEARED, ROOT
from tests.sdk.test_real_mlflow import names

EXAMPLES = ROOT / "examples" / "tracking"
TRAIN = ROOT / ".venv-train" / "bin" / "python"
needs_torch = pytest.mark.skipif(
    not TRAIN.exists(), reason=".venv-train (torch, Ray) is not there: `make test` makes it"
)
NETNS = ["unshare", "--net", "--"]


def launch(python: Path | str, script: str, *args: str, **env: str):
    clean = {k: v for k, v in os.environ.items() if k not in CLEARED}
    done = subprocess.run(
        [str(python), str(EXAMPLES / script), *args],
        env={**clean, "GIT_PYTHON_REFRESH": "quiet", **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "cgroups").mkdir()
    return str(tmp_path / "cgroups")


def newest(uri: str) -> mlflow.entities.Run:
    client = mlflow.MlflowClient(uri)
    where = client.get_experiment_by_name("dure-examples").experiment_id
    return client.search_runs([where], max_results=1)[0]


def system(run: mlflow.entities.Run) -> set[str]:
    return {k for k in run.data.metrics if k.startswith("system/")}


@needs_torch
def test_plain_loop(server, tree, tmp_path):
    env = {"MLFLOW_TRACKING_URI": server.uri, "JOB_OUTPUT_DIR": str(tmp_path)}
    launch(TRAIN, "plain_loop.py", **env, NODE_NAME="n1", DURE_CGROUP_ROOT=tree)
    run = newest(server.uri)
    assert system(run) == names(0, "n1")
    assert run.info.status == "FINISHED"
    assert (tmp_path / "model.pt").exists()
    assert json.loads((tmp_path / ".dure/progress.json").read_text())["done"] == 20


def test_logger_that_holds_its_run_by_id(server, tree):
    env = {"MLFLOW_TRACKING_URI": server.uri, "DURE_CGROUP_ROOT": tree}
    launch(sys.executable, "logger_by_run_id.py", **env)
    run = newest(server.uri)
    assert system(run) == names(0, None)
    assert run.info.status == "FINISHED"


@needs_torch
def test_torchrun_all_workers(server, tree):
    """Two ranks of one pod: one run, and its first rank collects for both."""
    env = {"MLFLOW_TRACKING_URI": server.uri, "NODE_NAME": "n1", "DURE_CGROUP_ROOT": tree}
    launch(TRAIN, "torchrun_ddp.py", "2", **env)
    run = newest(server.uri)
    assert system(run) == names(0, "n1")
    assert run.info.status == "FINISHED"
    assert run.data.tags["dure.sysmetrics.rank1"] == "n1"
    assert run.data.tags["dure.sysmetrics.collectors"] == "1"
    assert "loss" in run.data.metrics


def may_unshare() -> bool:
    done = subprocess.run([*NETNS, "true"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def ray_folder():
    """Ray's sockets need a short path."""
    folder = tempfile.mkdtemp(prefix="r")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@needs_torch
@pytest.mark.timeout(300)
def test_ray_train_all_workers(tree, tmp_path, ray_folder):
    """A real Ray with two CPU workers, in a network of its own where that is allowed."""
    inside = Path(__file__).with_name("ray_inside.py")
    clean = {k: v for k, v in os.environ.items() if k not in CLEARED}
    env = {**clean, "NODE_NAME": "n1", "DURE_CGROUP_ROOT": tree, "RAY_TMPDIR": ray_folder}
    env |= {"JOB_OUTPUT_DIR": str(tmp_path / "out"), "HOME": str(tmp_path)}
    command = [sys.executable, str(inside), str(TRAIN), str(EXAMPLES / "ray_train.py")]
    done = subprocess.run(
        [*(NETNS if may_unshare() else []), *command],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["status"] == "FINISHED"
    assert set(said["series"]) == names(0, "n1")
    assert said["tags"]["dure.sysmetrics.collectors"] == "1"
    assert said["tags"]["dure.sysmetrics.rank1"] == "n1"
    # Ray brings its own psutil and puts it first: the tag tells.
    assert "thirdparty_files" in said["tags"]["dure.sysmetrics.deps_paths"]
