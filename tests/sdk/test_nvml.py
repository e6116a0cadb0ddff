"""GPUs through the real nvidia-ml-py and a library that plays the driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dure_sdk import gpus
from tests.sdk.test_cgroup_trees import MIB, v2

SOURCE = Path(__file__).parents[1] / "nvml" / "fake_nvml.c"
LIBRARY = "libnvidia-ml.so.1"
TWO = """
{machine}
[gpu0]
name = NVIDIA RTX A6000
memory_total = 51527024640
memory_used = 10000000000
utilization = 37
power = 120000
power_limit = 300000
temperature = 54
{first}
[gpu1]
name = NVIDIA GeForce RTX 4090
memory_total = 25757220864
{second}
"""
ONE = {
    "memory_usage_megabytes",
    "memory_usage_percentage",
    "utilization_percentage",
    "power_usage_watts",
    "power_usage_percentage",
    "temperature_celsius",
}
# The list, wrapping and threads of a training program. MLflow's own collectors join where a test
# is about them; a cgroup stands for the others elsewhere (importing MLflow takes seconds).
SHOW = """
import json, pathlib, sys, time, logging
logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
from dure_sdk import gpus
from dure_sdk.collectors import build
from dure_sdk.monitor import Monitor, Plan
from dure_sdk.names import renamer
from dure_sdk.notices import Causes
gpus.DEV = pathlib.Path(sys.argv[1])
samples, tags, used = [], {}, []
causes = Causes()
def put(sample):
    samples.append({k: v for k, v in sample.values.items()})
    for line in sys.argv[3:]:
        if len(samples) == 2:
            exec(line)
made = lambda: build("r", "sqlite://", renamer(0, None), 0.3, causes, own_only=sys.argv[2] == "own")
monitor = Monitor(Plan(0.3, 1, "here", lambda: False), made, put, tags.update, lambda said: None,
                  lambda built: used.append(built), causes)
begun = time.monotonic()
monitor.start()
while len(samples) < 5 and time.monotonic() - begun < 15: time.sleep(0.02)
lasted = time.monotonic() - begun
monitor.stop(5)
built = used[0]
known = [list(g) for g in built.gpu.gpus.values()] if built.gpu else []
print(json.dumps([samples, known, lasted]))
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    flags = ["-O1", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([compiler, *flags, "-o", folder / LIBRARY, SOURCE], check=True)
    return folder


class Shown:
    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.returncode == 0, done.stderr
        self.samples, self.gpus, self.lasted_s = json.loads(done.stdout.splitlines()[-1])
        self.err = done.stderr
        self.warnings = [
            x for x in done.stderr.splitlines() if x.startswith("WARNING") and "GPU" in x
        ]

    def keys(self, index: int, at: int = -1) -> set[str]:
        prefix, end = f"system/gpu_{index}_", "/rank0"
        sample = self.samples[at]
        return {k[len(prefix) : -len(end)] for k in sample if k.startswith(prefix)}

    def others_go_on(self) -> bool:
        other = "system/container_memory_usage_percentage/rank0"
        return len(self.samples) >= 5 and all(other in s for s in self.samples)


@pytest.fixture
def show(library, tmp_path):
    def run(
        config: str | None, env=None, devices=("nvidia0", "nvidia1"), then=None, stock=False
    ) -> Shown:
        path = tmp_path / "gpus.ini"
        dev = tmp_path / "dev"
        dev.mkdir(exist_ok=True)
        for name in devices:
            (dev / name).touch()
        clean = {k: v for k, v in os.environ.items() if k not in gpus.LISTS}
        tree = v2(tmp_path / "cgroups", 500 * MIB)
        full = {**clean, "LD_LIBRARY_PATH": str(library), "DURE_CGROUP_ROOT": str(tree)}
        full.update(env or {})
        if config is not None:
            path.write_text(config)
            full["FAKE_NVML_CONFIG"] = str(path)
        change = []
        if then is not None:
            new = tmp_path / "new.ini"
            new.write_text(then)
            change = [f"pathlib.Path({str(new)!r}).rename({str(path)!r})"]
        done = subprocess.run(
            [sys.executable, "-c", SHOW, str(dev), "all" if stock else "own", *change],
            env=full,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Shown(done)

    return run


def two(machine: str = "", first: str = "", second: str = "") -> str:
    return TWO.format(machine=machine, first=first, second=second)


def test_two_gpus(show):
    got = show(two())
    assert got.keys(0) == got.keys(1) == ONE
    last = got.samples[-1]
    assert last["system/gpu_0_utilization_percentage/rank0"] == 37
    assert last["system/gpu_0_power_usage_watts/rank0"] == 120
    assert last["system/gpu_0_power_usage_percentage/rank0"] == 40
    assert last["system/gpu_0_temperature_celsius/rank0"] == 54
    assert last["system/gpu_0_memory_usage_megabytes/rank0"] == 10000
    assert got.gpus[1][1:] == [
        "GPU-fa4e0000-0000-0000-0000-000000000001",
        "NVIDIA GeForce RTX 4090",
    ]
    assert not got.warnings
    assert "10 series" not in got.err


def test_gpu_lost_before_the_start_costs_itself_alone(show):
    got = show(two(second="lost = 1"))
    assert got.keys(0) == ONE
    assert got.keys(1) == set()
    assert [w for w in got.warnings if "GPU is lost" in w and "GPU 1" in w] == got.warnings
    assert len(got.warnings) == 1


def test_gpu_lost_during_the_run_leaves_a_gap_and_no_stale_value(show):
    got = show(two(), then=two(second="lost = 1"))
    assert got.keys(1, 0) == ONE
    assert got.keys(1, -1) == set()
    assert got.keys(0, -1) == ONE
    assert len(got.warnings) == 1


def test_lost_gpu_that_comes_back_is_seen_again(show):
    got = show(two(second="lost = 1"), then=two())
    assert got.keys(1, 0) == set()
    assert got.keys(1, -1) == ONE


def test_power_that_is_not_supported(show):
    got = show(two(first="fail.nvmlDeviceGetPowerUsage = 3"))
    assert got.keys(0) == ONE - {"power_usage_watts", "power_usage_percentage"}
    assert got.keys(1) == ONE
    assert len(got.warnings) == 1
    assert "power draw" in got.warnings[0]
    assert "Not Supported" in got.warnings[0]


def test_power_limit_that_is_not_supported(show):
    got = show(two(first="fail.nvmlDeviceGetEnforcedPowerLimit = 3"))
    assert got.keys(0) == ONE - {"power_usage_percentage"}
    assert len(got.warnings) == 1


def test_mig_has_no_utilization_and_none_is_invented(show):
    got = show(two(first="mig = 1"))
    assert got.keys(0) == ONE - {"utilization_percentage"}
    assert len(got.warnings) == 1


def test_zero_totals_are_no_division(show):
    got = show(two(second="power_limit = 0").replace("25757220864", "0"))
    assert got.keys(1) == ONE - {"memory_usage_percentage", "power_usage_percentage"}
    assert not got.warnings


def test_driver_mismatch_in_nvmls_own_words(show):
    got = show(two(machine="fail.nvmlInitWithFlags = 18\nfail.nvmlInit_v2 = 18"), stock=True)
    assert got.keys(0) == set()
    assert got.others_go_on()
    ours = [line for line in got.err.splitlines() if "collector gpu failed" in line]
    assert len(ours) == 1
    assert "ersion" in ours[0]  # "RM has detected an NVML/RM version mismatch."


def test_hanging_call_costs_its_series_and_nothing_else(show):
    got = show(two(), then=two(machine="delay_ms.nvmlDeviceGetMemoryInfo = 6000"))
    assert got.keys(0, 0) == ONE
    assert got.keys(0, -1) == set()
    assert got.others_go_on()
    assert got.lasted_s < 6
    hanging = [x for x in got.err.splitlines() if "answer within" in x or "not returned" in x]
    assert 1 <= len(hanging) <= 2


def test_driver_that_hangs_from_the_start(show):
    got = show(
        two(machine="delay_ms.nvmlInitWithFlags = 9000\ndelay_ms.nvmlInit_v2 = 9000"), stock=True
    )
    assert got.others_go_on()
    assert len(got.samples) == 5
    assert got.err.count("monitor could not be built") == 1


@pytest.mark.parametrize(
    ("env", "uuids"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, ["1", "0"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-fa4e0000-0000-0000-0000-000000000001"}, ["1"]),
        ({"SLURM_JOB_GPUS": "0"}, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_GPUS": "0,1"}, ["1"]),
        ({"SLURM_JOB_GPUS": "6,7"}, ["0", "1"]),  # a device cgroup renumbers from 0
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, ["0", "1"]),
    ],
)
def test_only_the_jobs_own_gpus_by_position_in_its_list(show, env, uuids):
    got = show(two(), env)
    assert [g[0] for g in got.gpus] == list(range(len(uuids)))
    assert [g[1][-1] for g in got.gpus] == uuids
    assert got.keys(len(uuids)) == set()


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, ("nvidia0",)),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ("nvidia0",)),
        ({}, ()),
        ({}, ("nvidiactl", "nvidia-uvm")),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ()),
    ],
)
def test_no_gpu_assigned_is_one_notice(show, env, devices):
    got = show(two(), env, devices)
    assert not got.gpus
    assert got.err.count("no GPU is assigned") == 1
    assert not [line for line in got.err.splitlines() if "WARNING no GPU" in line]


def test_wsl_has_a_device_of_another_name(show):
    assert show(two(), devices=("dxg",)).keys(0) == ONE


def test_missing_nvidia_ml_py_is_one_warning(show, tmp_path):
    (tmp_path / "pynvml.py").write_text("raise ImportError('not here')")
    got = show(two(), {"PYTHONPATH": str(tmp_path)})
    assert got.keys(0) == set()
    assert got.err.count("nvidia-ml-py is missing") == 1
    assert got.others_go_on()
