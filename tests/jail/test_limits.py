"""Bombs in a jail under a real control group: contained, told, and nothing left.

Nothing here may run without a limit: every bomb sits in a group with few processes and
little memory.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dure.adapters.compute.local.cgroups import Group
from dure.core.model import OomKind, Outcome
from dure.core.oom import oom_kind
from dure.core.retry import judge
from tests.jail.rigs import JailRig, need_cgroups

MIB = 200
PROCESSES = 60
FILL = """
import sys
with open(sys.argv[1], "wb") as file:
    while True:
        file.write(b"x" * (4 << 20))
        file.flush()
"""
HOARD = "hoard = []\nwhile True: hoard.append(bytearray(8 << 20))"


@pytest.fixture(params=["bubblewrap", "bubblewrap-root", "apptainer"])
def rig(request, make: Callable[..., JailRig]) -> JailRig:
    need_cgroups()
    return make(request.param, processes=PROCESSES)


def test_memory_bomb_is_killed_and_the_counter_tells(rig):
    rig.run("python3", "-c", HOARD, memory_mib=MIB)
    evidence = rig.exited(1).evidence
    assert evidence.oom_kill > 0
    assert judge(evidence, cancelled=False) is Outcome.HOST_OOM
    assert rig.exit()["peak_mib"] <= MIB + 1
    rig.nothing_left()


def test_worker_is_killed_and_its_parent_only_fails(rig):
    """The exit code is 1 as for any bug; the counter knows better."""
    rig.run("bash", "-c", 'python3 -c "$0"; exit 1', HOARD, memory_mib=MIB)
    evidence = rig.exited(1).evidence
    assert evidence.oom_kill > 0
    assert oom_kind(evidence) is OomKind.HOST
    rig.nothing_left()


def test_the_whole_job_goes_when_one_process_was_killed(rig):
    """Half a distributed job would wait for its dead half for ever."""
    rig.run("bash", "-c", 'python3 -c "$0" & sleep 60; wait', HOARD, memory_mib=MIB)
    evidence = rig.exited(1).evidence
    assert evidence.signal == signal.SIGKILL
    assert oom_kind(evidence) is OomKind.HOST
    rig.nothing_left()


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_memory_files_count_as_the_jobs_memory(rig, folder):
    text = rig.run("python3", "-c", FILL, f"{folder}/bomb", memory_mib=MIB)
    evidence = rig.exited(1).evidence
    full = "No space left on device" in text or "File too large" in text
    assert evidence.oom_kill > 0 or full, text
    assert rig.exit()["peak_mib"] <= MIB + 1
    assert not Path(folder, "bomb").exists()
    rig.nothing_left()


def test_fork_bomb_is_contained(rig):
    bomb = "boom() { boom | boom & }; boom; sleep 1.5; echo survived"
    rig.launch("bash", "-c", bomb, memory_mib=400)
    spec = json.loads((rig.root / "1" / "1" / "spec.json").read_text())
    group = Group(spec["cgroup"])
    rig.wait(group.pids_refused)
    for _ in range(20):
        assert len(group.members()) <= PROCESSES
    rig.stop(0.3)
    rig.until(1, "Freed")
    rig.nothing_left()


def test_number_of_processes_is_limited(rig):
    code = (
        "import subprocess\nrunning = []\ntry:\n"
        "  while len(running) < 500: running.append(subprocess.Popen(['sleep', '30']))\n"
        "except OSError: pass\nprint(len(running))\n[p.kill() for p in running]"
    )
    text = rig.run("python3", "-c", code, memory_mib=400)
    assert 0 < int(text.splitlines()[0]) < PROCESSES
    assert f"at most {PROCESSES} processes" in text
    rig.nothing_left()


def test_cores_are_the_share(rig):
    code = (
        "import os, time\nif os.fork(): pass\nend = time.monotonic() + 1.5\n"
        "while time.monotonic() < end: pass\nt = os.times()\n"
        "os.write(1, f'{t.user + t.system}\\n'.encode())"
    )
    text = rig.run("python3", "-c", code, cores=1, memory_mib=400)
    used = sum(float(line) for line in text.split())
    assert used < 1.5 * 1.35, "two busy processes may use one core together"


def test_disk_filler_fails_and_the_job_goes_on(make):
    rig = make("bubblewrap-root", processes=PROCESSES, output_limit_mib=8)
    script = f"python3 -c '{FILL}' big 2>&1 | tail -n 1; ls -s big | cut -d' ' -f1; echo on"
    text = rig.run("bash", "-c", script)
    assert "File too large" in text
    assert text.splitlines()[-1].endswith("on")
    assert (rig.out(1) / "big").stat().st_size <= 8 << 20
    assert rig.exited(1).evidence.exit_code == 0
    rig.nothing_left()


def test_many_files_are_one_output_folder(make):
    rig = make("bubblewrap-root", processes=PROCESSES, output_limit_mib=8, quota_every_s=0.2)
    code = (
        "import time\nn = 0\nwhile n < 300:\n  try:\n    open(f'f{n}', 'wb').write(b'x' * 1_000_000)\n"
        "  except OSError as error: print(error.strerror); break\n  n += 1; time.sleep(0.05)"
    )
    text = rig.run("python3", "-c", code)
    assert "File too large" in text
    assert "the output folder reached its limit of 8 MiB" in text
    evidence = rig.exited(1).evidence
    assert (evidence.exit_code, evidence.full) == (0, ("output",))


def test_without_control_groups_processes_are_limited_all_the_same(make):
    rig = make("bubblewrap-root", processes=40, controllers=None)
    code = (
        "import subprocess\nrunning = []\ntry:\n"
        "  while len(running) < 80: running.append(subprocess.Popen(['sleep', '30']))\n"
        "except OSError: pass\nprint(len(running))\n[p.kill() for p in running]"
    )
    text = rig.run("python3", "-c", code)
    assert 0 < int(text.splitlines()[-1]) < 40
    rig.nothing_left()
