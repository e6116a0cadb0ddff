"""One reader for both layouts: real groups where the machine has them, files else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from dure.adapters.compute.local import controllers
from dure.adapters.compute.local.cgroups import Group
from dure.adapters.compute.local.rundir import Layout
from tests.jail.rigs import need_cgroups


def fake(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


V2 = {
    "memory__max": "",
    "memory__oom__group": "",
    "memory__swap__max": "",
    "cpu__max": "",
    "pids__max": "",
    "memory__events": "low 0\nhigh 3\nmax 9\noom 2\noom_kill 4\noom_group_kill 1\n",
    "memory__peak": str(300 << 20),
    "pids__events": "max 7\n",
    "cgroup__procs": "12\n34\n",
    "cgroup__kill": "",
}


def test_second_layout_sets_limits_and_reads_counters(tmp_path):
    folder = fake(tmp_path / "job", **V2)
    group = Group({"version": 2, "folders": {"all": str(folder)}})
    group.make(512, 2, 100)
    assert (folder / "memory.max").read_text() == str(512 << 20)
    assert (folder / "memory.oom.group").read_text() == "1"
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "cpu.max").read_text() == "200000 100000"
    assert (folder / "pids.max").read_text() == "100"
    assert (group.oom_kills(), group.peak_mib(), group.pids_refused()) == (4, 300, 7)
    assert group.members() == {12, 34}
    group.kill()
    assert (folder / "cgroup.kill").read_text() == "1"


def test_no_limit_is_set_for_zero(tmp_path):
    folder = fake(tmp_path / "job", **V2)
    Group({"version": 2, "folders": {"all": str(folder)}}).make(0, 0, 0)
    assert (folder / "memory.max").read_text() == ""
    assert (folder / "pids.max").read_text() == ""


def test_first_layout_reads_its_own_files(tmp_path):
    memory = fake(
        tmp_path / "memory",
        memory__limit_in_bytes="",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        memory__max_usage_in_bytes=str(64 << 20),
        cgroup__procs="5\n",
    )
    group = Group({"version": 1, "folders": {"memory": str(memory)}})
    group.make(256, 1, 9)
    assert (memory / "memory.limit_in_bytes").read_text() == str(256 << 20)
    assert (group.oom_kills(), group.peak_mib(), group.pids_refused()) == (3, 64, 0)


def test_a_group_that_is_gone_counts_nothing(tmp_path):
    for version, name in ((1, "memory"), (2, "all")):
        group = Group({"version": version, "folders": {name: str(tmp_path / "gone")}})
        assert (group.oom_kills(), group.peak_mib(), group.members()) == (0, 0, set())
        assert group.remove()


def test_real_group_kills_what_is_inside_and_goes():
    need_cgroups()
    layout = controllers.find().layout
    name = f"test-{os.getpid()}"
    folders = {c: f"{f}/{name}" for c, f in layout.folders.items()}
    group = Group({"version": layout.version, "folders": folders})
    group.make(64, 1, 20)
    try:
        with subprocess.Popen(["sleep", "60"]) as process:
            for folder in folders.values():
                Path(folder, "cgroup.procs").write_text(str(process.pid))
            assert group.members() == {process.pid}
            assert group.remove()
            assert process.wait(5) == -9
    finally:
        group.remove()
    assert not [f for f in folders.values() if Path(f).exists()]


# -- where groups may be made --------------------------------------------------------


def mounts(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "mounts"
    path.write_text("".join(f"none {line} 0 0\n" for line in lines))
    return str(path)


def own(tmp_path: Path, text: str) -> str:
    return str(fake(tmp_path / "self", cgroup=text))


def test_first_layout_is_found_by_its_controllers(tmp_path):
    for name in ("memory", "pids", "cpu"):
        (tmp_path / name).mkdir()
    lines = [f"{tmp_path}/{c} cgroup rw,{c}" for c in ("memory", "pids", "cpu")]
    lines.append(f"{tmp_path}/unified cgroup2 rw")
    found = controllers.find(mounts=mounts(tmp_path, *lines))
    folders = {c: f"{tmp_path}/{c}/dure" for c in ("memory", "pids", "cpu")}
    assert found.layout == Layout(version=1, folders=folders)


def test_delegated_group_of_the_second_layout(tmp_path):
    """The server moves itself down: a group with children holds no process."""
    service = fake(
        tmp_path / "cg" / "system.slice" / "dure.service",
        cgroup__controllers="cpu memory pids",
        cgroup__subtree_control="",
    )
    fake(service / "server", cgroup__procs="")
    found = controllers.find(
        mounts=mounts(tmp_path, f"{tmp_path}/cg cgroup2 rw"),
        own=own(tmp_path, "0::/system.slice/dure.service\n"),
    )
    assert found.layout == Layout(version=2, folders={"all": str(service)})
    assert (service / "server" / "cgroup.procs").read_text() == "0"
    assert (service / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_missing_controller_is_told(tmp_path):
    folder = fake(tmp_path / "cg" / "user", cgroup__controllers="pids")
    found = controllers.find(
        mounts=mounts(tmp_path, f"{tmp_path}/cg cgroup2 rw"), own=own(tmp_path, "0::/user\n")
    )
    assert found.layout is None
    assert found.problem == f"{folder} has not been given the controllers memory, cpu"


def test_nothing_mounted_is_told(tmp_path):
    assert controllers.find(mounts=mounts(tmp_path)).problem == "no control groups are mounted"
    nowhere = controllers.find(str(tmp_path / "nowhere"))
    assert nowhere.layout is None
    assert "No such file" in nowhere.problem
