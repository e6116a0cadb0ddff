"""What a beat says of this machine: its GPUs as they were last read, counted by reading."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from dure import __version__
from dure.adapters.compute.local.gpus import Found, Probe, probe
from dure.core.lease import NodeReport
from dure.core.model import Gpu, Node


class Gauge:
    """Reads the driver and counts the readings: one that comes twice must count once."""

    def __init__(self, ask: Callable[[], Probe] = probe) -> None:
        self._ask = ask
        self.count = 0
        self.last = Probe()

    def __call__(self) -> Probe:
        """One reading, for `Machine`."""
        self.last = self._ask()
        self.count += 1
        return self.last


def node_report(
    node: Node, gauge: Gauge, *, busy: Collection[int] = (), address: str = ""
) -> NodeReport:
    """The node for a beat; GPUs in `busy` still hold processes of leases that were lost."""
    gpus = tuple(
        msgspec.structs.replace(gpu, foreign=True) if gpu.index in busy else gpu
        for gpu in node.gpus
    )
    free_mib, used = _best(gauge.last.gpus)
    return NodeReport(
        node=node.name,
        gpus=msgspec.json.encode(gpus),
        sample=gauge.count,
        good=_good(gpus),
        free_vram_mib=free_mib,
        utilisation=used,
        cores=node.cores,
        memory_mib=node.memory_mib,
        reserve_mib=node.reserve_mib,
        version=__version__,
        address=address,
    )


def _good(gpus: tuple[Gpu, ...]) -> bool:
    """At least one GPU can be used; the others are told one by one."""
    return any(gpu.healthy and not gpu.foreign for gpu in gpus)


def _best(found: tuple[Found, ...]) -> tuple[int, int]:
    """Free memory and utilisation of the GPU with the most memory free."""
    free = [(f.mib - sum(use.mib for use in f.processes), f.utilisation) for f in found if f.mib]
    return max(free, key=lambda pair: pair[0], default=(0, 0))
