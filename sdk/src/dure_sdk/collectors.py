"""The list of collectors of one worker: MLflow's own, and ours appended to it.

The order is a contract: append → wrap → first collect → count.
"""

from __future__ import annotations

import importlib
from typing import Any, Callable, NamedTuple

from dure_sdk import cgroup, gpus
from dure_sdk.aside import Aside, bounded
from dure_sdk.monitor import NothingToCollectError
from dure_sdk.names import Rename, Renamed
from dure_sdk.notices import Causes, say

BUILD_LIMIT_S = 2.0
"""MLflow's constructor asks the GPU driver, which may hang."""
CALL_LIMIT_S = 2.0
STOCK = "mlflow.system_metrics.metrics"
STOCK_PARTS = (
    (f"{STOCK}.cpu_monitor", "CPUMonitor"),
    (f"{STOCK}.disk_monitor", "DiskMonitor"),
    (f"{STOCK}.network_monitor", "NetworkMonitor"),
)


class Built(NamedTuple):
    """What one worker collects with."""

    monitors: list[Renamed]
    cgroup: cgroup.CgroupCollector | None
    gpu: gpus.GpuCollector | None
    apart: tuple[Aside, ...]


def build(
    run_id: str, uri: str, rename: Rename, interval_s: float, causes: Causes, *, own_only: bool
) -> Built:
    """Make the list. `own_only`: leave out what the first worker of this node shows already."""
    monitors = [] if own_only else stock(run_id, uri, causes)
    limit_s = min(CALL_LIMIT_S, max(interval_s / 2, 0.2))
    apart = [Aside(m, limit_s) for m in monitors if _name(m) == "ROCMMonitor"]
    # MLflow's collector of NVIDIA GPUs loses all of them with one; ours stands in its place.
    monitors = [m for m in monitors if _name(m) not in {"ROCMMonitor", "GPUMonitor"}]
    container = _container()
    if container is not None:
        monitors.append(container)
    gpu = _gpu(causes, amd=bool(apart))
    if gpu is not None:
        apart.append(Aside(gpu, limit_s))
    monitors += apart
    if not monitors:
        raise NothingToCollectError("no collector could be built")
    return Built([Renamed(m, rename) for m in monitors], container, gpu, tuple(apart))


def stock(run_id: str, uri: str, causes: Causes) -> list[Any]:
    """MLflow's collectors, as its own monitor holds them."""
    try:
        importlib.import_module("psutil")
    except ImportError as error:
        raise NothingToCollectError(f"psutil is missing ({error})") from error
    try:
        module = importlib.import_module("mlflow.system_metrics.system_metrics_monitor")
        made = bounded(lambda: module.SystemMetricsMonitor(run_id, tracking_uri=uri), BUILD_LIMIT_S)
        return list(made.monitors)
    except Exception as error:  # noqa: BLE001 - MLflow's constructor runs foreign code
        causes.warn("stock", f"MLflow's monitor could not be built ({error}); its parts are used")
    return _parts(causes)


def _parts(causes: Causes) -> list[Any]:
    """The same collectors one by one: without a network there is still a CPU."""
    found = []
    for module, name in STOCK_PARTS:
        make: Callable[[], Any] = getattr(importlib.import_module(module), name)
        try:
            found.append(make())
        except Exception as error:  # noqa: BLE001 - one collector less, told once
            causes.warn(name, f"{name} could not be built: {error}")
    return found


def _container() -> cgroup.CgroupCollector | None:
    found = cgroup.detect()
    if found is None:
        say("no cgroup limit holds this process: no container_* series")
    return found


def _gpu(causes: Causes, *, amd: bool) -> gpus.GpuCollector | None:
    given = gpus.assigned()
    if not given.here:
        if not amd:
            say("no GPU is assigned to this container: no gpu_* series")
        return None
    nvml = gpus.nvml_module()
    if nvml is None:
        causes.warn(
            "pynvml",
            "a GPU is assigned, but nvidia-ml-py is missing: no gpu_* series. "
            "Put nvidia-ml-py into the image or mount Dure's bundle",
        )
        return None
    return gpus.GpuCollector(nvml, given.wanted, causes)


def _name(monitor: Any) -> str:
    return type(monitor).__name__
