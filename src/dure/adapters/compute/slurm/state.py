"""What both threads of the backend and its callers share, under one lock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping

import msgspec

from dure.adapters.compute.local.leases import Record
from dure.adapters.compute.slurm import nodes
from dure.adapters.compute.slurm.leases import Lease
from dure.adapters.compute.slurm.nodes import Mapped, Slot
from dure.adapters.compute.slurm.parse import FINAL, NodeLine
from dure.core.model import Node, NodeHealth
from dure.ports import Clock, LeaseKey, NodeChanged

log = logging.getLogger(__name__)


class State:
    """Leases, nodes and observations. Its methods are called with `lock` held."""

    def __init__(self, *, record: Record, mapped: Mapped, clock: Clock) -> None:
        self.lock = threading.RLock()
        self.record = record
        self.mapped = mapped
        self.clock = clock
        self.leases: dict[LeaseKey, Lease] = {}
        self.closing: dict[LeaseKey, Lease] = {}
        """Recorded as free, but Slurm has not said yet that the job is gone."""
        self.strangers: set[int] = set()
        """Jobs of ours in Slurm that no lease stands for."""
        self.nodes: dict[str, Node] = {}
        self.slots: dict[str, dict[str, Slot]] = {}
        self.problem = "Slurm has not been asked yet"

    def unsent(self) -> list[Lease]:
        """Launches that Slurm has not confirmed."""
        return [
            lease
            for lease in self.leases.values()
            if not (lease.slurm_id or lease.exited or lease.freed or lease.final)
        ]

    def drop(self, key: LeaseKey) -> None:
        """A lease that is recorded as free."""
        lease = self.leases.pop(key, None)
        if lease is not None and lease.holds:
            self.closing[key] = lease

    def all(self) -> list[Lease]:
        """Leases whose Slurm job may still be there."""
        return [*self.leases.values(), *self.closing.values()]

    def stopping(self) -> list[Lease]:
        """Leases with a stop to send. One whose sbatch got no answer is looked for first."""
        return [
            lease
            for lease in self.leases.values()
            if lease.signal_at and not lease.freed and (lease.slurm_id or not lease.launched.asked)
        ]

    def pending(self, *, held_before: float) -> list[Lease]:
        """Leases that Slurm has not started for too long."""
        return [
            lease
            for lease in self.leases.values()
            if lease.state == "PENDING" and lease.final is None and lease.held_at <= held_before
        ]

    def pretending(self, *, ended_before: float) -> list[int]:
        """Slurm jobs that go on although their files have long said that they ended."""
        return [
            lease.slurm_id
            for lease in self.closing.values()
            if lease.state not in FINAL and lease.end_at <= ended_before
        ]

    def own_gpus(self, node: str) -> int:
        """GPUs on a node that Slurm counts for Dure."""
        return sum(
            len(lease.launched.order.gpus)
            for lease in self.all()
            if lease.holds and lease.launched.order.placement.node == node
        )

    def leased(self, node: str) -> frozenset[int]:
        """Indices on a node that leases hold."""
        held = (lease.launched.order for lease in self.leases.values() if not lease.freed)
        return frozenset(
            index for order in held if order.placement.node == node for index in order.gpus
        )

    # -- nodes --

    def reached(self, problem: str) -> bool:
        """Slurm went away or came back: its nodes take no work meanwhile."""
        before, self.problem = self.problem, problem
        if bool(before) == bool(problem) or not problem:
            return False
        log.warning("Slurm is not to be reached: %s", problem)
        changed = [
            msgspec.structs.replace(node, health=NodeHealth.SUSPECTED)
            for node in self.nodes.values()
            if node.health is NodeHealth.STABLE
        ]
        for node in changed:
            self._put(node)
        return bool(changed)

    def _put(self, node: Node) -> None:
        self.nodes[node.name] = node
        self.record.add(NodeChanged(node=node))

    def compare(
        self, lines: Iterable[NodeLine], yielding: Mapping[str, int], *, tell: bool
    ) -> bool:
        """Tell what has changed of the nodes since the last look."""
        seen = {}
        now_ms = self.clock.now_ms()
        for line in lines:
            if nodes.usable(line, self.mapped):
                self.slots[line.name] = nodes.slots(line, self.mapped)
                seen[line.name] = nodes.node(
                    line,
                    self.mapped,
                    own=self.own_gpus(line.name),
                    leased=self.leased(line.name),
                    preemptible=yielding.get(line.name, 0),
                    now_ms=now_ms,
                )
        for name, old in self.nodes.items():
            if name not in seen:
                gone = "Slurm: the node is not in its configuration any more"
                seen[name] = msgspec.structs.replace(
                    old, health=NodeHealth.OFFLINE, drain_reason=gone
                )
        news = False
        for name, found in seen.items():
            before = self.nodes.get(name)
            last_ms = found.last_seen_ms or (before.last_seen_ms if before else 0)
            node = msgspec.structs.replace(found, last_seen_ms=last_ms)
            same = before and msgspec.structs.replace(before, last_seen_ms=last_ms) == node
            if same or not tell:  # whoever builds this asks for the inventory first
                self.nodes[name] = node
            else:
                self._put(node)
                news = True
        return news
