"""Discovery of GPUs: through the real nvidia-ml-py and a library that plays the driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dure.adapters.compute.local.gpus import Declared, Found, Machine, Probe, Usage, slug
from dure.adapters.runtime.process import ProcessRuntime
from dure.core.errors import DureError, ErrorCode
from dure.ports import Grant
from tests.contract.backends import order

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"
TWO = """
[gpu0]
name = NVIDIA RTX A6000
memory_total = 51527024640
{first}
[gpu1]
name = NVIDIA GeForce RTX 4090
memory_total = 25757220864
{second}
"""
SHOW = """
import json, sys, time, msgspec
from dure.adapters.compute.local.gpus import Machine
begun = time.monotonic()
machine = Machine("here", tiers={"NVIDIA RTX A6000": "A6000"}, timeout_s=0.5, refresh_s=0)
answers = []
for line in ["", *sys.stdin]:
    if line:
        exec(line)
    node = machine.node(wait=True)
    answers.append([msgspec.to_builtins(gpu) for gpu in node.gpus])
print(json.dumps([answers, machine.problem, time.monotonic() - begun]))
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


@pytest.fixture
def show(library, tmp_path):
    """Discovery in a process of its own: the loader reads LD_LIBRARY_PATH at its start."""

    def run(config: str | None, *then: str) -> tuple[list, str, float]:
        path = tmp_path / "gpus.ini"
        env = {**os.environ, "LD_LIBRARY_PATH": str(library)}
        if config is not None:
            path.write_text(config)
            env["FAKE_NVML_CONFIG"] = str(path)
        done = subprocess.run(
            [sys.executable, "-c", SHOW],
            env=env,
            input="".join(f"{line}\n" for line in then).replace("PATH", repr(str(path))),
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        answers, problem, seconds = json.loads(done.stdout)
        return answers, problem, seconds

    return run


def two(first: str = "", second: str = "") -> str:
    return TWO.format(first=first, second=second)


def test_two_gpus(show):
    (gpus,), problem, _ = show(two())
    assert [(g["index"], g["tier"], g["healthy"], g["foreign"]) for g in gpus] == [
        (0, "A6000", True, False),
        (1, "RTX4090", True, False),
    ]
    assert gpus[1]["uuid"] == "GPU-fa4e0000-0000-0000-0000-000000000001"
    assert problem == ""


def test_gpu_that_is_lost_stays_as_a_sick_one(show):
    config = json.dumps(two(second="lost = 1"))
    write = f"import os; open(PATH + 'x', 'w').write({config}); os.rename(PATH + 'x', PATH)"
    (before, after), problem, _ = show(two(), write)
    assert [g["healthy"] for g in before] == [True, True]
    assert [g["healthy"] for g in after] == [True, False]
    assert after[1]["tier"] == "RTX4090"
    assert problem == "GPU 1: GPU is lost"


def test_gpu_that_was_never_seen_well_is_no_capacity(show):
    (gpus,), problem, _ = show(two(first="lost = 1"))
    assert [(g["index"], g["tier"]) for g in gpus] == [(1, "RTX4090")]
    assert problem == "GPU 0: GPU is lost"


def test_hanging_driver_hangs_nobody(show):
    (gpus,), problem, seconds = show("delay_ms.nvmlDeviceGetMemoryInfo = 3000\n" + two())
    assert gpus == []
    assert problem == "the NVIDIA driver does not answer"
    assert seconds < 2.5


def test_driver_that_begins_to_hang_makes_its_gpus_sick(show):
    config = json.dumps("delay_ms.nvmlDeviceGetCount_v2 = 3000\n" + two())
    write = f"import os; open(PATH + 'x', 'w').write({config}); os.rename(PATH + 'x', PATH)"
    (before, after), _, _ = show(two(), write)
    assert [g["healthy"] for g in before] == [True, True]
    assert [g["healthy"] for g in after] == [False, False]


def test_no_driver(show):
    (gpus,), problem, _ = show(None)
    assert gpus == []
    assert problem.startswith("no NVIDIA driver: ")


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
def test_failing_calls_are_values(show, function):
    (gpus,), problem, _ = show(f"fail.{function} = 999\n" + two())
    assert gpus == []
    assert "Unknown Error" in problem


def test_what_is_not_supported_is_left_out(show):
    rules = (
        "fail.nvmlDeviceGetUtilizationRates = 3\nfail.nvmlDeviceGetComputeRunningProcesses_v3 = 3"
    )
    (gpus,), problem, _ = show(two(first=rules))
    assert [g["healthy"] for g in gpus] == [True, True]
    assert problem == ""


def test_foreign_process(show):
    with subprocess.Popen(["/bin/sleep", "60"], env={}) as stranger:
        ours = {"DURE_JOB_EPOCH": "1"}
        with subprocess.Popen(["/bin/sleep", "60"], env=ours) as job:
            try:
                use = 4 << 30
                config = two(f"processes = {stranger.pid}:{use}", f"processes = {job.pid}:{use}")
                (gpus,), _, _ = show(config)
            finally:
                job.kill()
                stranger.kill()
    assert [g["foreign"] for g in gpus] == [True, False]


def machine(*found: Found, declared: tuple[Declared, ...] = (), **kw: object) -> Machine:
    return Machine("here", declared, ask=lambda: Probe(gpus=found, problem=""), **kw)


def a4090(index: int, **kw: object) -> Found:
    return Found(index=index, name="NVIDIA GeForce RTX 4090", uuid=f"GPU-{index}", **kw)


def test_declared_slots_where_there_is_no_gpu():
    made = machine(
        declared=(Declared(tier="A", count=2, simulated=True), Declared(tier="B", simulated=True))
    )
    gpus = made.node().gpus
    assert [(g.index, g.tier, g.simulated) for g in gpus] == [
        (0, "A", True),
        (1, "A", True),
        (2, "B", True),
    ]


def test_declared_names_for_real_gpus_and_slots_beside_them():
    declared = (Declared(tier="big", count=1), Declared(tier="play", simulated=True))
    gpus = machine(a4090(0), a4090(1), declared=declared).node().gpus
    assert [(g.index, g.tier, g.simulated) for g in gpus] == [
        (0, "big", False),
        (1, "RTX4090", False),
        (2, "play", True),
    ]


def test_real_gpus_that_are_not_there_are_refused():
    with pytest.raises(DureError) as refused:
        machine(a4090(0), declared=(Declared(tier="RTX4090", count=2),))
    assert refused.value.code is ErrorCode.BAD_SETTING
    assert refused.value.params["value"] == (
        "2 real GPUs are declared, but 1 found; simulated = true makes slots"
    )


def test_small_strangers_count_only_on_a_busy_gpu():
    small = (Usage(pid=1, mib=10),)
    gpus = machine(a4090(0, processes=small), a4090(1, processes=small, utilisation=50)).node().gpus
    assert [g.foreign for g in gpus] == [False, True]


def test_probe_that_raises_is_a_value():
    def broken() -> Probe:
        raise OSError("libnvidia-ml: bad ELF")

    made = Machine("here", ask=broken)
    assert made.node().gpus == ()
    assert "bad ELF" in made.problem


def test_poll_never_waits():
    calls: list[float] = []

    def slow() -> Probe:
        calls.append(0)
        if len(calls) > 1:
            time.sleep(0.5)
        return Probe(gpus=(a4090(0),))

    made = Machine("here", refresh_s=0, timeout_s=0.2, ask=slow)
    begun = time.monotonic()
    assert [gpu.healthy for gpu in made.node().gpus] == [True]
    assert time.monotonic() - begun < 0.1
    time.sleep(0.3)
    assert [gpu.healthy for gpu in made.node().gpus] == [False]
    time.sleep(0.4)
    made.node()
    time.sleep(0.3)


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        ("NVIDIA GeForce RTX 3080 Ti", "RTX3080Ti"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIE-16GB"),
        ("???", "GPU"),
    ],
)
def test_slug(name, tier):
    assert slug(name) == tier


def test_runtime_shows_real_gpus_by_uuid_and_hides_the_rest():
    runtime = ProcessRuntime({"PATH": "/bin", "DURE_TOKEN": "secret", "HOME": "/home/kim"})
    grant = Grant(
        run_dir="/r", output_dir="/r/out", gpu_uuids=("GPU-1", "GPU-3"), cores=2, memory_mib=1
    )
    made = runtime.command(order("true", 7, env={"JOB_ID": "0", "OMP_NUM_THREADS": "9"}), grant)
    assert made.env["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-3"
    assert made.env["JOB_ID"] == "7"
    assert made.env["OMP_NUM_THREADS"] == "9"
    assert made.env["HOME"] == "/home/kim"
    assert "DURE_TOKEN" not in made.env
