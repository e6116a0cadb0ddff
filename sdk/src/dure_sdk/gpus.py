"""The job's own GPUs through NVML, each one and each question for itself.

Rule: whether GPUs were given to this container is told by its device nodes and by the lists that
the scheduler or the user set, never by an error of NVML and never by `NVIDIA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dure_sdk.notices import Causes

DEV = Path("/dev")
MB = 1e6
LISTS = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""Who narrows the visible devices, the closest first. Dure's own list is the first of them."""


class Assigned(NamedTuple):
    """What this process may use: `None` = whatever NVML lists."""

    here: bool
    wanted: tuple[str, ...] | None = None


class Gpu(NamedTuple):
    """One GPU of the job, by its position in the visible list."""

    position: int
    uuid: str
    model: str


def assigned(environ: Mapping[str, str] | None = None) -> Assigned:
    """Whether a GPU is assigned to this container, and which ones."""
    env = os.environ if environ is None else environ
    if not any(DEV.glob("nvidia[0-9]*")) and not (DEV / "dxg").exists():
        return Assigned(here=False)
    for name in LISTS:
        if name in env:
            wanted = _listed(env[name])
            return Assigned(here=bool(wanted), wanted=wanted)
    return Assigned(here=True)


def _listed(text: str) -> tuple[str, ...]:
    """CUDA reads its list up to the first entry that names no device."""
    found = []
    for entry in (e.strip() for e in text.split(",")):
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        found.append(entry)
    return tuple(found)


class GpuCollector:
    """`gpu_<i>_*` series in the form of MLflow's collectors. Call it from one thread."""

    name = "gpu"

    def __init__(self, nvml: Any, wanted: tuple[str, ...] | None, causes: Causes) -> None:
        self._nvml = nvml
        self._wanted = wanted
        self._causes = causes
        self._handles: dict[int, Any] = {}
        self._count: int | None = None
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._milliwatts: float | None = None
        self.gpus: dict[int, Gpu] = {}

    def collect_metrics(self) -> None:
        """One sample of every GPU that answers; each failing question is told once."""
        if self._count is None:
            self._nvml.nvmlInit()
            self._count = len(self._entries(self._nvml.nvmlDeviceGetCount()))
        for index in range(self._count):
            self._one(index)

    def aggregate_metrics(self) -> dict[str, float]:
        """The mean of each series."""
        return {key: round(sum(v) / len(v), 1) for key, v in self._metrics.items()}

    def clear_metrics(self) -> None:
        """Forget the samples."""
        self._metrics.clear()

    def _entries(self, count: int) -> tuple[str, ...]:
        """The visible list. A device cgroup renumbers from 0: then Slurm's numbers do not fit."""
        every = tuple(str(i) for i in range(count))
        wanted = every if self._wanted is None else self._wanted
        beyond = any(e.isdigit() and int(e) >= count for e in wanted)
        self._wanted = every if beyond and len(wanted) == count else wanted
        return self._wanted

    def _one(self, index: int) -> None:
        error_type = self._nvml.NVMLError
        self._milliwatts = None
        try:
            handle = self._handle(index)
        except error_type as error:
            self._told(index, "found", error)
            return
        questions: tuple[tuple[str, Callable[[Any], dict[str, float]]], ...] = (
            ("memory", self._memory),
            ("utilization", self._utilization),
            ("power draw", self._power),
            ("power limit", self._power_share),
            ("temperature", self._temperature),
        )
        for what, ask in questions:
            try:
                values = ask(handle)
            except error_type as error:
                self._told(index, what, error)
                continue
            for key, value in values.items():
                self._metrics[f"gpu_{index}_{key}"].append(value)

    def _handle(self, index: int) -> Any:
        """Asked again at each sample until it is there: a lost GPU may come back."""
        if index not in self._handles:
            entry = (self._wanted or ())[index]
            get = self._nvml.nvmlDeviceGetHandleByIndex
            if not entry.isdigit():
                get = self._nvml.nvmlDeviceGetHandleByUUID
            handle = get(int(entry) if entry.isdigit() else entry)
            uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
            self.gpus[index] = Gpu(index, uuid, _text(self._nvml.nvmlDeviceGetName(handle)))
            self._handles[index] = handle
        return self._handles[index]

    def _told(self, index: int, what: str, error: Any) -> None:
        """Once per GPU and cause; "not supported" is a cause of its own for each question."""
        code = getattr(error, "value", None)
        unsupported = code == getattr(self._nvml, "NVML_ERROR_NOT_SUPPORTED", 3)
        cause = f"gpu {index} {code} {what if unsupported else ''}"
        text = f"its {what} cannot be read: {error}" if unsupported else str(error)
        self._causes.warn(cause, f"GPU {index}: {text}; its other series go on")

    def _memory(self, handle: Any) -> dict[str, float]:
        info = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        values = {"memory_usage_megabytes": info.used / MB}
        if info.total:
            values["memory_usage_percentage"] = info.used / info.total * 100
        return values

    def _utilization(self, handle: Any) -> dict[str, float]:
        return {
            "utilization_percentage": float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        }

    def _power(self, handle: Any) -> dict[str, float]:
        self._milliwatts = float(self._nvml.nvmlDeviceGetPowerUsage(handle))
        return {"power_usage_watts": self._milliwatts / 1000}

    def _power_share(self, handle: Any) -> dict[str, float]:
        if self._milliwatts is None:
            return {}  # told as the power draw already
        limit = self._nvml.nvmlDeviceGetEnforcedPowerLimit(handle)
        return {"power_usage_percentage": self._milliwatts / limit * 100} if limit else {}

    def _temperature(self, handle: Any) -> dict[str, float]:
        sensor = getattr(self._nvml, "NVML_TEMPERATURE_GPU", 0)
        return {"temperature_celsius": float(self._nvml.nvmlDeviceGetTemperature(handle, sensor))}


def _text(value: Any) -> str:
    """Old nvidia-ml-py answers with bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def nvml_module() -> Any | None:
    """pynvml, if the image or the bundle has it."""
    if "pynvml" not in sys.modules:
        try:
            __import__("pynvml")
        except ImportError:
            return None
    return sys.modules["pynvml"]
