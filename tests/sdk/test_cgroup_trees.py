"""Limits and usage read from trees of plain files: v1, v2, nested, hybrid."""

from __future__ import annotations

from pathlib import Path

import pytest

from dure_sdk.cgroup import detect

MIB = 1 << 20
STAT_V2 = (
    "anon 104857600\nfile 300000000\nkernel 30000000\nshmem 10000000\ninactive_file 52428800\n"
    "slab_reclaimable 20000000\nslab_unreclaimable 5000000\n"
)
STAT_V1 = (
    "cache 1\nrss 1\ntotal_cache 300000000\ntotal_rss 104857600\ntotal_shmem 10000000\n"
    "total_inactive_file 52428800\nhierarchical_memory_limit {limit}\n"
)
NO_LIMIT_V1 = 9223372036854771712
NO_LIMIT_64K_PAGES = 9223372036854710272
KEYS = {
    "container_memory_usage_megabytes",
    "container_memory_usage_percentage",
    "container_memory_unreclaimable_megabytes",
    "container_memory_unreclaimable_percentage",
}
CPU_KEYS = {"container_cpu_utilization_percentage", "container_cpu_throttled_percentage"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("DURE_CGROUP_ROOT", str(tmp_path))
    return tmp_path


def put(folder: Path, **files: object) -> Path:
    """Files by name; `__` stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return folder


def v2(folder: Path, limit: object = "max", quota: str = "max 100000", **more: object) -> Path:
    files = {
        "memory__max": limit,
        "memory__current": 250 * MIB,
        "memory__stat": STAT_V2,
        "memory__events": "low 0\nmax 3\noom 1\noom_kill 1",
        "cpu__max": quota,
        "cpu__stat": "usage_usec 1000000\nnr_periods 10\nnr_throttled 2\n",
    }
    return put(folder, **{**files, **more})


def v1_memory(
    folder: Path, limit: int = NO_LIMIT_V1, used: int = 250 * MIB, effective=None
) -> Path:
    return put(
        folder,
        memory__limit_in_bytes=limit,
        memory__usage_in_bytes=used,
        memory__stat=STAT_V1.format(limit=effective or limit),
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 0",
        memory__max_usage_in_bytes=260 * MIB,
    )


def v1_cpu(folder: Path, quota: int = -1) -> Path:
    return put(
        folder,
        cpu__cfs_quota_us=quota,
        cpu__cfs_period_us=100000,
        cpu__stat="nr_periods 10\nnr_throttled 2\nthrottled_time 5",
    )


def v1_account(folder: Path, used_ns: int = 1_000_000_000) -> Path:
    return put(folder, cpuacct__usage=used_ns)


def proc(root: Path, own: str, *mounts: str) -> None:
    put(root / "proc" / "self", cgroup=own, mountinfo="\n".join(mounts))


def one(collector) -> dict[str, float]:
    collector.clear_metrics()
    collector.collect_metrics()
    return collector.aggregate_metrics()


UNIFIED = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"


def test_v2_container(root):
    put(root, cgroup__controllers="cpu memory")
    v2(root, 500 * MIB, memory__peak=270 * MIB)
    found = detect()
    got = one(found)
    assert set(got) == KEYS
    working = 250 * MIB - 52428800
    assert got["container_memory_usage_megabytes"] == round(working / 1e6, 1)
    assert got["container_memory_usage_percentage"] == 40.0
    # anon + shmem + what of the kernel's cannot be given back: file cache does not count.
    held = 104857600 + 10000000 + 30000000 - 20000000
    assert got["container_memory_unreclaimable_megabytes"] == round(held / 1e6, 1)
    assert got["container_memory_unreclaimable_percentage"] == round(held / 500 / MIB * 100, 1)
    assert found.oom_kills() == 1
    assert found.kernel_peak_bytes() == 270 * MIB
    assert found.peak_bytes == working


def test_v2_kernel_without_its_sum(root):
    old = STAT_V2.replace("kernel 30000000\n", "kernel_stack 1000000\npagetables 2000000\n")
    v2(root, 500 * MIB, memory__stat=old)
    held = 104857600 + 10000000 + 5000000 + 1000000 + 2000000
    assert one(detect())["container_memory_unreclaimable_megabytes"] == round(held / 1e6, 1)


def test_v2_without_memory_peak(root):
    v2(root, 500 * MIB)
    assert detect().kernel_peak_bytes() is None


def test_v2_cpu_and_pressure_from_the_second_reading_on(root, monkeypatch):
    v2(root, 500 * MIB, "150000 100000", memory__pressure="some avg10=0 total=1000\nfull total=0")
    now = [100.0]
    monkeypatch.setattr("dure_sdk.cgroup.time.monotonic", lambda: now[0])
    found = detect()
    assert set(one(found)) == KEYS
    now[0] += 10
    put(root, cpu__stat="usage_usec 7000000\nnr_periods 110\nnr_throttled 27")
    put(root, memory__pressure="some avg10=0 total=501000\nfull total=0")
    got = one(found)
    assert got["container_cpu_utilization_percentage"] == 40.0  # 6 s of 15
    assert got["container_cpu_throttled_percentage"] == 25.0
    assert got["container_memory_pressure_percentage"] == 5.0
    now[0] += 10
    assert one(found)["container_cpu_throttled_percentage"] == 0.0  # it did not run: no period


def test_memory_limit_only(root):
    v2(root, 500 * MIB)
    found = detect()
    one(found)
    assert set(one(found)) == KEYS


def test_quota_only_has_no_percentage_of_memory(root):
    v2(root, "max", "100000 100000")
    found = detect()
    one(found)
    put(root, cpu__stat="usage_usec 2000000\nnr_periods 20\nnr_throttled 2")
    assert set(one(found)) == CPU_KEYS | {
        "container_memory_usage_megabytes",
        "container_memory_unreclaimable_megabytes",
    }


@pytest.mark.parametrize("make", [v2, lambda r: None, lambda r: put(r, cgroup__controllers="")])
def test_no_limit_no_collector(root, make):
    make(root)
    assert detect() is None


def test_host_root_of_v2_has_no_memory_files(root):
    put(root, cgroup__controllers="cpu memory", cpu__stat="usage_usec 1")
    assert detect() is None


def test_slurm_limits_an_ancestor(root):
    """Slurm puts the limit on the job; step, user and task say `max`."""
    mount = root / "sys/fs/cgroup"
    job = "system.slice/slurmstepd.scope/job_7"
    task = f"{job}/step_0/user/task_0"
    proc(root, f"0::/{task}", UNIFIED)
    put(mount, cgroup__controllers="cpu memory")
    v2(mount / job, 500 * MIB)
    for inner in ("step_0", "step_0/user", "step_0/user/task_0"):
        v2(mount / job / inner, memory__current=10 * MIB)
    found = detect()
    assert one(found)["container_memory_usage_percentage"] == 40.0
    assert found.facts()["cgroup"] == str(mount / job)


def test_tightest_of_several_limits(root):
    mount = root / "sys/fs/cgroup"
    proc(root, "0::/a/b", UNIFIED)
    v2(mount / "a", 800 * MIB)
    v2(mount / "a/b", 400 * MIB)
    assert one(detect())["container_memory_usage_percentage"] == 50.0
    put(mount / "a", memory__max=250 * MIB)
    assert one(detect())["container_memory_usage_percentage"] == 80.0


def test_equal_limits_the_outer_one_is_full_first(root):
    mount = root / "sys/fs/cgroup"
    proc(root, "0::/pod/c", UNIFIED)
    v2(mount / "pod", 500 * MIB)
    v2(mount / "pod/c", 500 * MIB, memory__current=100 * MIB)
    assert one(detect())["container_memory_usage_percentage"] == 40.0


def test_limit_changed_while_running(root):
    v2(root, 500 * MIB)
    found = detect()
    assert one(found)["container_memory_usage_percentage"] == 40.0
    put(root, memory__max=1000 * MIB)
    assert one(found)["container_memory_usage_percentage"] == 20.0
    put(root, memory__max="max")
    assert "container_memory_usage_percentage" not in one(found)


def test_vanishing_file_costs_its_own_series_only(root):
    v2(root, 500 * MIB, "100000 100000")
    found = detect()
    one(found)
    (root / "memory.current").unlink()
    put(root, cpu__stat="usage_usec 2000000\nnr_periods 20\nnr_throttled 2")
    found.clear_metrics()
    with pytest.raises(FileNotFoundError):
        found.collect_metrics()
    assert set(found.aggregate_metrics()) == CPU_KEYS
    put(root, memory__current=250 * MIB)
    assert set(one(found)) >= KEYS


@pytest.mark.parametrize("joint", [False, True])
def test_v1_container(root, joint):
    v1_memory(root / "memory", 500 * MIB)
    folders = ["cpu,cpuacct"] * 2 if joint else ["cpu", "cpuacct"]
    v1_cpu(root / folders[0], 100000)
    v1_account(root / folders[1])
    found = detect()
    got = one(found)
    assert set(got) == KEYS
    assert got["container_memory_usage_percentage"] == 40.0
    assert got["container_memory_unreclaimable_megabytes"] == round(114857600 / 1e6, 1)
    put(root / folders[0], cpu__stat="nr_periods 20\nnr_throttled 7\nthrottled_time 5")
    v1_account(root / folders[1], 2_000_000_000)
    got = one(found)
    assert set(got) == KEYS | CPU_KEYS
    assert got["container_cpu_throttled_percentage"] == 50.0
    assert found.oom_kills() == 0
    assert found.kernel_peak_bytes() == 260 * MIB


@pytest.mark.parametrize("unlimited", [NO_LIMIT_V1, NO_LIMIT_64K_PAGES])
def test_v1_without_a_limit(root, unlimited):
    v1_memory(root / "memory", unlimited)
    v1_cpu(root / "cpu")
    assert detect() is None


V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
    "33 31 0:30 / /sys/fs/cgroup/cpuacct rw - cgroup cgroup rw,cpuacct",
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
)


def test_v1_nested(root):
    proc(root, "4:memory:/slurm/uid_1/job_7/step_0\n2:cpuacct:/\n1:cpu:/", *V1_MOUNTS)
    job = root / "sys/fs/cgroup/memory/slurm/uid_1/job_7"
    v1_memory(job, 500 * MIB)
    v1_memory(job / "step_0", used=20 * MIB, effective=500 * MIB)
    v1_memory(root / "sys/fs/cgroup/memory")
    got = one(detect())
    assert got["container_memory_usage_percentage"] == 40.0


def test_v1_limit_of_an_ancestor_that_is_not_mounted(root):
    v1_memory(root / "memory", effective=1000 * MIB)
    assert one(detect())["container_memory_usage_percentage"] == 20.0


def test_v1_quota_on_an_ancestor_with_cpuacct_apart(root):
    proc(root, "2:cpuacct:/job/step\n1:cpu:/job/step\n4:memory:/", *V1_MOUNTS)
    tree = root / "sys/fs/cgroup"
    for name in ("job", "job/step"):
        v1_cpu(tree / "cpu" / name, 50000 if name == "job" else -1)
    v1_account(tree / "cpuacct/job", 1_000_000_000)
    v1_account(tree / "cpuacct/job/step", 0)
    found = detect()
    one(found)
    v1_account(tree / "cpuacct/job", 1_000_000_000_000)
    assert one(found)["container_cpu_utilization_percentage"] > 0


def test_hybrid_takes_memory_from_v1(root):
    hybrid = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    proc(root, "4:memory:/job\n1:cpu:/\n0::/job", *V1_MOUNTS, hybrid)
    put(root / "sys/fs/cgroup/unified/job", cgroup__controllers="hugetlb")
    v1_memory(root / "sys/fs/cgroup/memory/job", 500 * MIB)
    assert one(detect())["container_memory_usage_percentage"] == 40.0


def test_part_of_the_hierarchy_mounted(root):
    """A container without a cgroup namespace: only its own part is mounted."""
    proc(root, "0::/docker/abc", UNIFIED.replace(" / ", " /docker/abc "))
    v2(root / "sys/fs/cgroup", 500 * MIB)
    assert one(detect())["container_memory_usage_percentage"] == 40.0


def test_path_outside_the_namespace(root):
    proc(root, "0::/../../other", UNIFIED)
    v2(root / "sys/fs/cgroup", 500 * MIB)
    assert one(detect())["container_memory_usage_percentage"] == 40.0


def test_mount_point_with_a_space(root):
    proc(root, "0::/", UNIFIED.replace("/sys/fs/cgroup", "/sys/fs/c\\040g"))
    v2(root / "sys/fs/c g", 500 * MIB)
    assert one(detect())["container_memory_usage_percentage"] == 40.0
