"""A real kernel: limit, nested limit, OOM kill, throttling. Needs root and writable cgroup v1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

V1 = Path("/sys/fs/cgroup")
MIB = 1 << 20


def own(controller: str) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return V1 / controller / path.lstrip("/")
    pytest.skip(f"no cgroup v1 with {controller} here")


class Groups:
    """New groups below the test's own, removed at the end."""

    def __init__(self) -> None:
        self.made: list[Path] = []

    def make(self, controller: str, *names: str) -> Path:
        folder = own(controller) / f"dure-test-{uuid.uuid4().hex[:8]}"
        for name in ("", *names):
            folder = folder / name if name else folder
            try:
                folder.mkdir()
            except OSError as error:
                pytest.skip(f"cgroup v1 {controller} cannot be written here: {error.strerror}")
            self.made.append(folder)
        return folder

    def close(self) -> None:
        for folder in reversed(self.made):
            folder.rmdir()


@pytest.fixture
def groups():
    made = Groups()
    yield made
    made.close()


def inside(folders: list[Path], text: str) -> subprocess.CompletedProcess[str]:
    """A program that joins the groups first, then samples itself."""
    joins = "".join(f"open({str(f / 'cgroup.procs')!r}, 'w').write('0')\n" for f in folders)
    program = "import json, time\n" + joins + "from dure_sdk.cgroup import detect\n"
    return subprocess.run(
        [sys.executable, "-c", program + textwrap.dedent(text)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SAMPLE = """
found = detect()
block = bytearray(60 << 20)
found.collect_metrics()
print(json.dumps([found.aggregate_metrics(), found.facts()["limit_mb"]]))
"""


@pytest.mark.parametrize("names", [(), ("step", "task")])
def test_limit_own_or_on_an_ancestor(groups, names):
    leaf = groups.make("memory", *names)
    top = groups.made[0]
    (top / "memory.limit_in_bytes").write_text(str(300 * MIB))
    done = inside([leaf], SAMPLE)
    assert done.returncode == 0, done.stderr
    got, limit_mb = json.loads(done.stdout)
    assert limit_mb == round(300 * MIB / 1e6, 1)
    assert 60 * MIB / 1e6 <= got["container_memory_unreclaimable_megabytes"] < 150
    share = got["container_memory_usage_megabytes"] / limit_mb * 100
    assert got["container_memory_usage_percentage"] == pytest.approx(share, abs=0.2)


def test_files_read_do_not_look_like_memory_that_is_held(groups, tmp_path):
    """Read twice, a file's cache is on the active list: the working set rises, the risk does not."""
    leaf = groups.make("memory")
    (leaf / "memory.limit_in_bytes").write_text(str(300 * MIB))
    path = tmp_path / "data"
    path.write_bytes(os.urandom(MIB) * 150)
    text = f"""
    import os
    for _ in range(3):
        with open({str(path)!r}, 'rb') as f:
            while f.read(1 << 16): pass
    found = detect()
    found.collect_metrics()
    print(json.dumps(found.aggregate_metrics()))
    """
    done = inside([leaf], text)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["container_memory_unreclaimable_percentage"] < 15


def test_oom_kill_is_counted_and_last_words_are_left(groups, tmp_path):
    leaf = groups.make("memory")
    (leaf / "memory.limit_in_bytes").write_text(str(100 * MIB))
    text = """
    from dure_sdk.words import Words
    found = detect()
    words = Words(0, {"run_id": "r"})
    hold = []
    while True:
        hold.append(bytearray(8 << 20))
        found.collect_metrics()
        words.write({"ended": False, **found.facts()})
    """
    os.environ["DURE_LAST_WORDS_DIR"] = str(tmp_path)
    try:
        done = inside([leaf], text)
    finally:
        del os.environ["DURE_LAST_WORDS_DIR"]
    assert done.returncode == -9, done.stderr
    said = json.loads((tmp_path / "last-words-rank0.json").read_text())
    # The killed program could say nothing; the file and its group's counters say all.
    assert said["ended"] is False
    assert said["unreclaimable_mb"] > 60
    counters = (Path(said["cgroup"]) / "memory.oom_control").read_text()
    assert "oom_kill 1" in counters


def test_child_that_is_killed_is_counted(groups):
    leaf = groups.make("memory")
    (leaf / "memory.limit_in_bytes").write_text(str(150 * MIB))
    text = """
    import subprocess, sys
    found = detect()
    before = found.oom_kills()
    child = subprocess.run([sys.executable, "-c", "x = [bytearray(8 << 20) for _ in range(99)]"])
    print(json.dumps([child.returncode, found.oom_kills() - before]))
    """
    done = inside([leaf], text)
    assert json.loads(done.stdout) == [-9, 1], done.stderr


def test_throttling(groups):
    quota = groups.make("cpu")
    account = groups.make("cpuacct")
    if not (quota / "cpu.cfs_quota_us").exists():
        pytest.skip("this kernel has no CPU quota")
    (quota / "cpu.cfs_quota_us").write_text("20000")
    text = """
    found = detect()
    found.collect_metrics()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        pass
    found.clear_metrics()
    found.collect_metrics()
    print(json.dumps(found.aggregate_metrics()))
    """
    done = inside([quota, account], text)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["container_cpu_utilization_percentage"] == pytest.approx(100, abs=35)
    assert got["container_cpu_throttled_percentage"] > 50
