"""The whole server on a real Slurm: submit, run, charge; and the `dure slurm` commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dure.adapters.clock import ManualClock
from dure.core.errors import DureError
from dure.core.invariants import check_world
from dure.core.model import JobRequest, JobState, Lab, User
from dure.engine import commands
from dure.settings import load
from dure.wiring.audit import read_world
from dure.wiring.build import Installation
from dure.wiring.slurm import slurm_backend

SETTINGS = """
[server]
state_dir = "{home}/state"
[engine]
sweep_s = 1.0
[node]
enabled = false
[slurm]
enabled = true
conf = "{conf}"
run_root = "{home}/runs"
accounts = {{ kim = "nobody" }}
tiers = {{ rtx4090 = "RTX4090" }}
preemptible = ["backfill"]
query_s = 1.0
poll_s = 0.05
simulated = true
"""


@pytest.fixture
def home():
    with tempfile.TemporaryDirectory(prefix="dure-slurm-site-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder).resolve()


@pytest.fixture
def config(shared_bed, home):
    path = home / "dure.toml"
    path.write_text(SETTINGS.format(home=home, conf=shared_bed.conf))
    return path


def test_jobs_are_run_charged_and_accounted_for(config):
    installation = Installation(load(config, env={}))
    engine = installation.engine
    try:
        installation.register()
        kim = User(name="kim", lab="BCG")
        with engine.change("admin") as work:
            work.tx.put_lab(Lab(name="BCG"))
            work.tx.put_user(kim)
        installation.controller.start()
        sizes = (1, 2, 4, 1, 1)
        requests = [
            JobRequest(name="t", lab="BCG", command=("sh", "-c", "sleep 0.3"), num_gpus=n)
            for n in sizes
        ]
        jobs = commands.submit(engine, kim, requests).jobs
        end = time.monotonic() + 18
        while time.monotonic() < end:
            with engine.store.read() as tx:
                states = [tx.job(job.id).state for job in jobs]
                open_attempts = tx.open_attempts()
            if set(states) == {JobState.COMPLETED} and not open_attempts:
                break
            time.sleep(0.05)
        assert set(states) == {JobState.COMPLETED}, states
        with engine.store.read() as tx:
            now_ms = installation.clock.now_ms()
            world = read_world(tx, now_ms, installation.settings.policy.half_life_ms)
        assert check_world(world) == []
        assert sorted(len(a.gpus) for a in world.attempts) == sorted(sizes)
    finally:
        installation.close()


def test_settings_that_cannot_work_stop_the_start(home, monkeypatch):
    def settings(**changes: object):
        env = {f"DURE_SLURM__{k.upper()}": json.dumps(v) for k, v in changes.items()}
        return load(None, env)

    with pytest.raises(DureError) as empty:
        slurm_backend(settings(), home, ManualClock(1))
    assert empty.value.params["key"] == "slurm.run_root"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DureError) as user:
        slurm_backend(settings(run_root=str(home / "r")), home, ManualClock(1))
    assert user.value.params["key"] == "slurm.as_user"


def dure(*words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DURE_", "SLURM_"))}
    program = str(Path(sys.executable).with_name("dure"))
    return subprocess.run(
        [program, *words], env=env, capture_output=True, text=True, timeout=30, check=False
    )


def test_check_looks_at_the_real_cluster(config):
    done = dure("slurm", "check", "--json", "--config", str(config))
    found = {f["name"]: f["status"] for f in json.loads(done.stdout)}
    assert (done.returncode, found["slurm"], found["gpus"]) == (0, "ok", "ok"), done.stdout
    assert found["cgroups"] == "warn"  # this testbed limits no memory
    text = dure("slurm", "check", "--config", str(config)).stdout
    assert "RTX4090 × 4" in text


def test_check_of_nothing_says_so(home):
    path = home / "none.toml"
    path.write_text(f'[slurm]\nbin_dir = "{home}/no/bin"\n')
    done = dure("slurm", "check", "--config", str(path))
    assert done.returncode == 1
    assert "cannot be run" in done.stdout


def test_advice_is_taken_by_a_real_slurm(config, shared_bed):
    done = dure("slurm", "config", "--config", str(config))
    assert done.returncode == 0, done.stderr
    names = [w for w in done.stdout.split() if w.startswith("PartitionName=")]
    assert names == ["PartitionName=dure-rtx4090", "PartitionName=backfill"]
    lines = [x for x in done.stdout.splitlines() if x.startswith("PartitionName=dure-")]
    for text in lines:
        shared_bed.run("scontrol", "create", *text.split())
    try:
        assert "dure-rtx4090" in shared_bed.run("scontrol", "-o", "show", "partition")
    finally:
        shared_bed.run("scontrol", "delete", "PartitionName=dure-rtx4090")
