"""This machine as a node: its GPUs by NVML, or slots that an operator declared.

A driver may fail or hang at any call: every failure is a value, and no caller waits longer
than the time given.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import msgspec

from dure.core.errors import DureError, ErrorCode
from dure.core.model import Gpu, Node, NodeId, TierId, Value


class Declared(Value, frozen=True, kw_only=True):
    """Slots of one tier: simulated ones, or real GPUs in the order of their indices."""

    tier: str
    count: int = 1
    simulated: bool = False


class Usage(Value, frozen=True, kw_only=True):
    """A process on a GPU; `mib` is 0 where the driver does not tell."""

    pid: int
    mib: int


class Found(Value, frozen=True, kw_only=True):
    """One GPU as the driver tells; `name` is empty if it could not."""

    index: int
    name: str = ""
    uuid: str = ""
    mib: int = 0
    healthy: bool = True
    utilisation: int = 0
    processes: tuple[Usage, ...] = ()
    problem: str = ""


class Probe(Value, frozen=True, kw_only=True):
    """One look at the driver; `problem` says why it told nothing."""

    gpus: tuple[Found, ...] = ()
    problem: str = ""


def probe() -> Probe:
    """Ask NVML; may take as long as the driver likes."""
    try:
        import pynvml  # noqa: PLC0415 - most machines of a test run have no driver
    except ImportError:
        return Probe(problem="nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Probe(problem=f"no NVIDIA driver: {error}")
    try:
        count = pynvml.nvmlDeviceGetCount()
        return Probe(gpus=tuple(_probe_gpu(pynvml, index) for index in range(count)))
    except pynvml.NVMLError as error:
        return Probe(problem=str(error))
    finally:
        _try(pynvml, pynvml.nvmlShutdown)


def _try(nvml: ModuleType, call: Callable[..., object], *args: object) -> object:
    """Answer of one call, or None: what a driver does not know it refuses."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return None


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _probe_gpu(nvml: ModuleType, index: int) -> Found:
    n = nvml
    try:
        handle = n.nvmlDeviceGetHandleByIndex(index)
        name = _text(n.nvmlDeviceGetName(handle))
        uuid = _text(n.nvmlDeviceGetUUID(handle))
        memory = n.nvmlDeviceGetMemoryInfo(handle).total
    except n.NVMLError as error:
        return Found(index=index, healthy=False, problem=str(error))
    rates = _try(n, n.nvmlDeviceGetUtilizationRates, handle)
    users = _try(n, n.nvmlDeviceGetComputeRunningProcesses, handle)
    return Found(
        index=index,
        name=name,
        uuid=uuid,
        mib=int(memory) >> 20,
        utilisation=int(getattr(rates, "gpu", 0)),
        processes=tuple(
            Usage(pid=int(u.pid), mib=int(u.usedGpuMemory or 0) >> 20)
            for u in (users if isinstance(users, list) else [])
        ),
    )


def slug(name: str) -> str:
    """Tier name for a GPU nobody named: `NVIDIA GeForce RTX 4090` becomes `RTX4090`."""
    short = re.sub(r"\b(NVIDIA|GeForce|Tesla|Quadro|Graphics)\b", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^A-Za-z0-9._-]+", "", short) or "GPU"


def is_ours(pid: int) -> bool:
    """Whether a process was started by a job of this machine's Dure, or cannot be seen.

    In another PID namespace the driver's numbers mean nothing here; blaming a stranger
    for the job's own use would take the GPU away for ever.
    """
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return b"DURE_JOB_EPOCH=" in environ


class Machine:
    """The node that this process runs on. `poll` never waits; `node` waits once, at first."""

    def __init__(
        self,
        name: str,
        declared: Sequence[Declared] = (),
        *,
        tiers: Mapping[str, str] | None = None,
        reserve_mib: int = 0,
        timeout_s: float = 5.0,
        refresh_s: float = 10.0,
        foreign_mib: int = 256,
        foreign_utilisation: int = 20,
        ask: Callable[[], Probe] = probe,
    ) -> None:
        self.name = name
        self.problem = ""
        self._declared = tuple(declared)
        self._tiers = dict(tiers or {})
        self._reserve_mib = reserve_mib
        self._timeout_s = timeout_s
        self._refresh_s = refresh_s
        self._foreign_mib = foreign_mib
        self._foreign_utilisation = foreign_utilisation
        self._ask = ask
        self._lock = threading.Lock()
        self._answer: Probe | None = None
        self._asked_at = -1e9
        self._worker: threading.Thread | None = None
        self._known: dict[int, Found] = {}
        self._refresh(wait=True)
        self._refuse_missing()

    def _refuse_missing(self) -> None:
        real = sum(d.count for d in self._declared if not d.simulated)
        if real > len(self._known):
            found = len(self._known)
            why = self.problem or f"{found} found"
            value = f"{real} real GPUs are declared, but {why}; simulated = true makes slots"
            raise DureError(ErrorCode.BAD_SETTING, key="node.gpus", value=value)

    def node(self, *, wait: bool = False) -> Node:
        """The node as it is known now."""
        self._refresh(wait=wait)
        gpus = [self._gpu(found) for _, found in sorted(self._known.items())]
        index = max(self._known, default=-1) + 1
        for declared in self._declared:
            for _ in range(declared.count if declared.simulated else 0):
                gpus.append(Gpu(index=index, tier=TierId(declared.tier), simulated=True))
                index += 1
        return Node(
            name=NodeId(self.name),
            backend="local",
            gpus=tuple(gpus),
            cores=len(os.sched_getaffinity(0)),
            memory_mib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
            reserve_mib=self._reserve_mib,
        )

    def _gpu(self, found: Found) -> Gpu:
        strangers = [use for use in found.processes if not is_ours(use.pid)]
        busy = found.utilisation >= self._foreign_utilisation
        alone = len(strangers) == len(found.processes)
        foreign = any(use.mib >= self._foreign_mib or (busy and alone) for use in strangers)
        return Gpu(
            index=found.index,
            tier=self._tier(found),
            uuid=found.uuid,
            healthy=found.healthy,
            foreign=foreign,
        )

    def _tier(self, found: Found) -> TierId:
        names = [d.tier for d in self._declared for _ in range(d.count) if not d.simulated]
        position = sorted(self._known).index(found.index)
        if position < len(names):
            return TierId(names[position])
        return TierId(self._tiers.get(found.name) or slug(found.name))

    def _refresh(self, *, wait: bool) -> None:
        """Begin a new look when it is time; take the answer of the last one if it is there."""
        now = time.monotonic()
        with self._lock:
            asking = self._worker is not None and self._worker.is_alive()
            if not asking and now >= self._asked_at + self._refresh_s:
                self._asked_at = now
                self._worker = threading.Thread(target=self._work, name="dure-nvml", daemon=True)
                self._worker.start()
                asking = True
            worker = self._worker
        if wait and worker is not None:
            worker.join(self._timeout_s)
        with self._lock:
            answer, self._answer = self._answer, None
        if answer is not None:
            self._learn(answer)
        elif asking and now >= self._asked_at + (0 if wait else self._timeout_s):
            self._learn(Probe(problem="the NVIDIA driver does not answer"))

    def _work(self) -> None:
        try:
            answer = self._ask()
        except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            answer = Probe(problem=f"{type(error).__name__}: {error}")
        with self._lock:
            self._answer = answer

    def _learn(self, answer: Probe) -> None:
        """A GPU that was seen once stays, sick, when the driver no longer tells of it."""
        self.problem = answer.problem
        seen = {found.index: found for found in answer.gpus}
        for index, known in self._known.items():
            found = seen.get(index)
            if found is None or not found.name:
                seen[index] = msgspec.structs.replace(
                    known, healthy=False, processes=(), utilisation=0
                )
        for found in answer.gpus:
            if found.problem:
                self.problem = f"GPU {found.index}: {found.problem}"
        # One that has never told its name has no tier: it is no capacity yet.
        self._known = {index: found for index, found in seen.items() if found.name}
