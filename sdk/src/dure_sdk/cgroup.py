"""The container's own memory and CPU, relative to the limit that really holds it.

Rule: usage is read at the folder that owns the limit. Where Slurm limits a job and leaves its
steps unlimited, the job's usage is what the kernel compares before it kills.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from dure_sdk.cgroup_tree import Chain, chain

if TYPE_CHECKING:
    from pathlib import Path

NO_LIMIT_BYTES = 1 << 62
"""v1 writes "no limit" as the largest number of whole pages, which depends on the page size."""
MB = 1e6
V2_KERNEL = ("slab_unreclaimable", "kernel_stack", "pagetables", "sec_pagetables", "percpu")
"""Used where memory.stat has no sum `kernel` (before Linux 5.18)."""


class Owner(NamedTuple):
    """A limit and the folder where it and its usage stand."""

    folder: Path
    limit: float | None


class Memory(NamedTuple):
    """One reading, in bytes."""

    working_set: float
    unreclaimable: float
    limit: float | None


class MemoryGroup:
    """Memory of the tightest limit among this process's cgroup and its ancestors."""

    def __init__(self, found: Chain) -> None:
        self._found = found

    def owner(self) -> Owner:
        """Read anew each time: a pod can be resized while it runs."""
        read = self._limit_v2 if self._found.version == 2 else self._limit_v1
        owner = _tightest(self._found.folders, read)
        if self._found.version == 1:
            owner = self._hidden_ancestor(owner)
        return owner

    def read(self) -> Memory:
        """Working set as the kubelet counts it, and what the kernel cannot give back."""
        owner = self.owner()
        stat = _pairs(owner.folder / "memory.stat")
        if self._found.version == 2:
            used = _number(owner.folder / "memory.current")
            inactive, anon, shmem = stat["inactive_file"], stat["anon"], stat["shmem"]
            kernel = (
                stat["kernel"] - stat["slab_reclaimable"]
                if "kernel" in stat
                else sum(stat[name] for name in V2_KERNEL)
            )
        else:
            used = _number(owner.folder / "memory.usage_in_bytes")
            inactive, anon = stat["total_inactive_file"], stat["total_rss"]
            # v1 does not say which kernel memory could be given back, so it counts none.
            shmem, kernel = stat["total_shmem"], 0.0
        return Memory(max(used - inactive, 0.0), anon + shmem + max(kernel, 0.0), owner.limit)

    def stalled_s(self) -> float | None:
        """Seconds in which some task waited for memory, summed up; None without PSI."""
        path = self.owner().folder / "memory.pressure"
        try:
            fields = path.read_text().split("\n", maxsplit=1)[0].split()
        except OSError:
            return None
        totals = [f for f in fields if f.startswith("total=")]
        return int(totals[0][6:]) / 1e6 if fields[:1] == ["some"] and totals else None

    def oom_kills(self) -> int | None:
        """Kills so far. v1 counts a kill only in the group in which it happened."""
        if self._found.version == 2:
            return _count(self.owner().folder / "memory.events", "oom_kill")
        counts = [_count(f / "memory.oom_control", "oom_kill") for f in self._found.folders]
        known = [c for c in counts if c is not None]
        return sum(known) if known else None

    def peak(self) -> float | None:
        """The kernel's own peak in bytes since the group was made, where it keeps one."""
        name = "memory.peak" if self._found.version == 2 else "memory.max_usage_in_bytes"
        try:
            return _number(self.owner().folder / name)
        except (OSError, ValueError):
            return None

    def _limit_v2(self, folder: Path) -> float | None:
        return _limit(folder / "memory.max")

    def _limit_v1(self, folder: Path) -> float | None:
        return _limit(folder / "memory.limit_in_bytes")

    def _hidden_ancestor(self, owner: Owner) -> Owner:
        """v1 tells the limit of ancestors that are not mounted here; their usage it does not."""
        try:
            effective = _pairs(owner.folder / "memory.stat").get("hierarchical_memory_limit")
        except OSError:
            return owner
        if effective is None or effective >= min(owner.limit or NO_LIMIT_BYTES, NO_LIMIT_BYTES):
            return owner
        return Owner(self._found.folders[-1], effective)


class CpuGroup:
    """CPU time and quota of the tightest quota among this process's cgroup and its ancestors."""

    def __init__(self, found: Chain, accounts: Chain | None) -> None:
        self._found = found
        self._accounts = accounts

    def owner(self) -> Owner:
        """The folder with the smallest quota; the limit is in cores."""
        read = _cores_v2 if self._found.version == 2 else _cores_v1
        return _tightest(self._found.folders, read)

    def used_s(self) -> float:
        """CPU seconds used so far below the quota."""
        owner = self.owner()
        if self._found.version == 2:
            return _pairs(owner.folder / "cpu.stat")["usage_usec"] / 1e6
        return _number(self._account(owner.folder) / "cpuacct.usage") / 1e9

    def periods(self) -> tuple[float, float]:
        """(periods in which it ran, periods in which it was stopped by the quota) so far."""
        stat = _pairs(self.owner().folder / "cpu.stat")
        return stat["nr_periods"], stat["nr_throttled"]

    def _account(self, folder: Path) -> Path:
        """The folder of the same level where v1 mounts cpu and cpuacct apart."""
        if self._accounts is None:
            return folder
        height = len(self._found.folders) - 1 - self._found.folders.index(folder)
        rows = self._accounts.folders
        return rows[max(len(rows) - 1 - height, 0)]


class CgroupCollector:
    """`container_*` series, in the form of MLflow's collectors."""

    name = "cgroup"

    def __init__(self, memory: MemoryGroup | None, cpu: CpuGroup | None) -> None:
        self._memory = memory
        self._cpu = cpu
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._before: dict[str, tuple[float, float]] = {}
        self.peak_bytes = 0.0
        self.last: Memory | None = None

    def collect_metrics(self) -> None:
        """One sample. What needs two readings appears from the second on."""
        failed: list[Exception] = []
        for collect in (self._collect_memory, self._collect_cpu):
            try:
                collect()
            except (OSError, ValueError) as error:  # noqa: PERF203 - two at most
                failed.append(error)  # a file that is gone costs its own series only
        if failed:
            raise failed[0]

    def aggregate_metrics(self) -> dict[str, float]:
        """The mean of each series."""
        return {key: round(sum(v) / len(v), 1) for key, v in self._metrics.items()}

    def clear_metrics(self) -> None:
        """Forget the samples, not the counters' last readings."""
        self._metrics.clear()

    def oom_kills(self) -> int | None:
        """Kills so far in the limited group, where it can be told."""
        return self._memory.oom_kills() if self._memory else None

    def kernel_peak_bytes(self) -> float | None:
        """The kernel's own peak since the group was made, where it keeps one."""
        return self._memory.peak() if self._memory else None

    def facts(self) -> dict[str, Any]:
        """For the last-words file: where to look, and what was seen last."""
        said: dict[str, Any] = {"mem_peak_sampled_mb": round(self.peak_bytes / MB, 1)}
        if self._memory is not None:
            said["cgroup"] = str(self._memory.owner().folder)
        if self.last is not None:
            said["working_set_mb"] = round(self.last.working_set / MB, 1)
            said["unreclaimable_mb"] = round(self.last.unreclaimable / MB, 1)
            said["limit_mb"] = round(self.last.limit / MB, 1) if self.last.limit else None
        return said

    def _collect_memory(self) -> None:
        group = self._memory
        if group is None:
            return
        now = group.read()
        self.last = now
        self.peak_bytes = max(self.peak_bytes, now.working_set)
        for name, value in (("usage", now.working_set), ("unreclaimable", now.unreclaimable)):
            self._add(f"container_memory_{name}_megabytes", value / MB)
            if now.limit:
                self._add(f"container_memory_{name}_percentage", value / now.limit * 100)
        stalled = group.stalled_s() if now.limit else None
        if stalled is not None:
            self._rate("container_memory_pressure_percentage", stalled, time.monotonic(), 100)

    def _collect_cpu(self) -> None:
        group = self._cpu
        cores = group.owner().limit if group else None
        if group is None or not cores:
            return  # no quota, or it was taken away while the job ran
        self._rate(
            "container_cpu_utilization_percentage", group.used_s(), time.monotonic(), 100 / cores
        )
        periods, stopped = group.periods()
        self._rate("container_cpu_throttled_percentage", stopped, periods, 100, idle=0.0)

    def _rate(
        self, key: str, value: float, per: float, scale: float, idle: float | None = None
    ) -> None:
        """The growth of `value` for each unit of `per`, from the second reading on."""
        before = self._before.get(key)
        self._before[key] = (value, per)
        if before is None or value < before[0] or per < before[1]:
            return  # the first reading, or another folder's counters after a resize
        if per > before[1]:
            self._add(key, (value - before[0]) / (per - before[1]) * scale)
        elif idle is not None:
            self._add(key, idle)

    def _add(self, key: str, value: float) -> None:
        self._metrics[key].append(value)


def detect() -> CgroupCollector | None:
    """A collector if a limit really holds this process, else None. Judged by the files alone."""
    memory_chain, cpu_chain = chain("memory"), chain("cpu")
    memory = MemoryGroup(memory_chain) if memory_chain else None
    cpu = CpuGroup(cpu_chain, chain("cpuacct")) if cpu_chain else None
    if cpu and not cpu.owner().limit:
        cpu = None
    if cpu is None and (memory is None or not memory.owner().limit):
        return None
    if memory is not None and not _readable(memory):
        memory = None
    return CgroupCollector(memory, cpu) if memory or cpu else None


def _readable(group: MemoryGroup) -> bool:
    """The root of a host's v2 tree has no memory.current."""
    try:
        group.read()
    except (OSError, KeyError, ValueError):
        return False
    return True


def _tightest(folders: tuple[Path, ...], read: Callable[[Path], float | None]) -> Owner:
    """The smallest limit; of equal ones the outermost, whose usage is never the smaller."""
    best = Owner(folders[0], None)
    for folder in folders:
        limit = read(folder)
        if limit is not None and (best.limit is None or limit <= best.limit):
            best = Owner(folder, limit)
    return best


def _limit(path: Path) -> float | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return float(text) if text.isdigit() and int(text) < NO_LIMIT_BYTES else None


def _cores_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _cores_v1(folder: Path) -> float | None:
    try:
        quota = _number(folder / "cpu.cfs_quota_us")
        return quota / _number(folder / "cpu.cfs_period_us") if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _number(path: Path) -> float:
    return float(path.read_text())


def _pairs(path: Path) -> dict[str, float]:
    """A flat keyed file; a key that a kernel does not have counts as 0."""
    found: dict[str, float] = defaultdict(float)
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if value.strip().isdigit():
            found[key] = float(value)
    return found


def _count(path: Path, key: str) -> int | None:
    try:
        pairs = _pairs(path)
    except OSError:
        return None
    return int(pairs[key]) if key in pairs else None
