"""A check of the simulator's placement against published numbers: the openb experiment.

Pods that ask for CPU, memory and a part of one GPU or several whole ones arrive in random
order on a cluster of mixed nodes and never leave; told is which share of all GPUs has been
given out when pods for as many GPUs as there are have asked. Published by the authors of
FGD (USENIX ATC 2023) for several schedulers. Dure places whole GPUs only: none of this is
used by the planner.
"""

from __future__ import annotations

import csv
import gzip
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

WHOLE = 1000
"""One GPU, in thousandths."""


class Machine(msgspec.Struct, gc=False):
    """A node and what is free on it; `gpus` are the free thousandths of each GPU."""

    model: str
    cpu_milli: int
    memory_mib: int
    gpus: list[int]


class Pod(msgspec.Struct, frozen=True, gc=False):
    """What one pod asks for: `num_gpus` GPUs, `gpu_milli` thousandths of each."""

    cpu_milli: int
    memory_mib: int
    num_gpus: int
    gpu_milli: int
    models: frozenset[str] = frozenset()

    @property
    def asked_milli(self) -> int:
        """Thousandths of GPUs in all."""
        return self.num_gpus * self.gpu_milli


def read_machines(path: Path) -> list[Machine]:
    """The nodes, everything free."""
    return [
        Machine(
            row["model"],
            int(row["cpu_milli"]),
            int(row["memory_mib"]),
            [WHOLE] * int(row["gpu"]),
        )
        for row in _rows(path)
    ]


def read_pods(path: Path) -> list[Pod]:
    """The pods of a list."""
    return [
        Pod(
            cpu_milli=int(row["cpu_milli"]),
            memory_mib=int(row["memory_mib"]),
            num_gpus=int(row["num_gpu"]),
            gpu_milli=int(row["gpu_milli"]),
            models=frozenset(m for m in (row.get("gpu_spec") or "").split("|") if m),
        )
        for row in _rows(path)
    ]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


class Cluster:
    """Machines while pods come, kept in the order of what is free."""

    def __init__(self, machines: Sequence[Machine], rng: random.Random) -> None:
        self.rng = rng
        self.machines = [msgspec.structs.replace(m, gpus=[*m.gpus]) for m in machines]
        self.total_milli = sum(sum(m.gpus) for m in machines)
        self._most_cpu = max(m.cpu_milli for m in machines)
        self._most_gpu = max(sum(m.gpus) for m in machines)
        self._largest = [max(m.gpus, default=0) for m in machines]
        self._order = sorted((self._free(m), i) for i, m in enumerate(self.machines))
        # Most pods want a GPU: they need not look at machines that have none left.
        self._with_gpu = [e for e in self._order if self._largest[e[1]]]

    def by_free(self, pod: Pod) -> Iterator[int]:
        """Machines that may suit the pod, the one with least free first."""
        machines, largest = self.machines, self._largest
        cpu, gpu = pod.cpu_milli, pod.gpu_milli if pod.num_gpus else 0
        order = self._with_gpu if pod.num_gpus else self._order
        return (i for _, i in order if largest[i] >= gpu and machines[i].cpu_milli >= cpu)

    def _free(self, machine: Machine) -> float:
        """Half free CPU and half free GPU, in parts of the largest machine."""
        return machine.cpu_milli / self._most_cpu / 2 + sum(machine.gpus) / self._most_gpu / 2

    def fits(self, pod: Pod, number: int) -> bool:
        """Whether the pod could run on this machine now."""
        if pod.num_gpus and self._largest[number] < pod.gpu_milli:
            return False
        m = self.machines[number]
        if pod.cpu_milli > m.cpu_milli or pod.memory_mib > m.memory_mib:
            return False
        if pod.models and m.model not in pod.models:
            return False
        return pod.num_gpus < 2 or sum(g >= pod.gpu_milli for g in m.gpus) >= pod.num_gpus

    def place(self, pod: Pod, number: int, rank: Rank) -> None:
        """Take what the pod asks for, from the GPUs that `rank` puts first."""
        m = self.machines[number]
        self._leave(number)
        m.cpu_milli -= pod.cpu_milli
        m.memory_mib -= pod.memory_mib
        fitting = [i for i, g in enumerate(m.gpus) if g >= pod.gpu_milli]
        for i in sorted(fitting, key=lambda i: rank(m.gpus[i]))[: pod.num_gpus]:
            m.gpus[i] -= pod.gpu_milli
        self._largest[number] = max(m.gpus, default=0)
        entry = (self._free(m), number)
        insort(self._order, entry)
        if self._largest[number]:
            insort(self._with_gpu, entry)

    def _leave(self, number: int) -> None:
        entry = (self._free(self.machines[number]), number)
        del self._order[bisect_left(self._order, entry)]
        if self._largest[number]:
            del self._with_gpu[bisect_left(self._with_gpu, entry)]


Rank = Callable[[int], float]
"""Which GPU of a machine a pod takes first, by its free thousandths."""


class BestFit:
    """The machine with least free after placement, and its fullest GPU."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def machine(self, pod: Pod) -> int | None:
        """What a pod takes is the same everywhere: least free before is least after."""
        cluster = self.cluster
        return next((i for i in cluster.by_free(pod) if cluster.fits(pod, i)), None)

    def rank(self, free_milli: int) -> float:
        """The fullest that has enough."""
        return free_milli


class Anywhere:
    """Any machine and any GPU with equal chances."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def machine(self, pod: Pod) -> int | None:
        """Try some before looking at all of them."""
        cluster = self.cluster
        for _ in range(8):
            i = cluster.rng.randrange(len(cluster.machines))
            if cluster.fits(pod, i):
                return i
        fitting = [i for i in cluster.by_free(pod) if cluster.fits(pod, i)]
        return cluster.rng.choice(fitting) if fitting else None

    def rank(self, free_milli: int) -> float:
        """Chance."""
        del free_milli
        return self.cluster.rng.random()


def allocated(
    machines: Sequence[Machine],
    pods: Sequence[Pod],
    scheduler: type[BestFit | Anywhere],
    seed: int,
) -> float:
    """Per cent of all GPUs given out when as much as there is has been asked for."""
    rng = random.Random(seed)  # noqa: S311 - a repeatable experiment
    cluster = Cluster(machines, rng)
    chosen = scheduler(cluster)
    asked = given = 0
    for pod in _inflated(pods, cluster.total_milli, rng):
        if asked + pod.asked_milli > cluster.total_milli:
            break
        asked += pod.asked_milli
        number = chosen.machine(pod)
        if number is not None:
            cluster.place(pod, number, chosen.rank)
            given += pod.asked_milli
    return 100 * given / cluster.total_milli


def _inflated(pods: Sequence[Pod], total_milli: int, rng: random.Random) -> list[Pod]:
    """The list with pods drawn again until 130 % of the GPUs are asked for, shuffled."""
    drawn = [*pods]
    asked = sum(p.asked_milli for p in pods)
    while asked < 1.3 * total_milli:
        again = rng.choice(pods)
        drawn.append(again)
        asked += again.asked_milli
    rng.shuffle(drawn)
    return drawn
