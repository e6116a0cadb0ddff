"""What the queue holds of each lease, turned into observations, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from dure.adapters.compute.edge.payload import decode_result
from dure.core.lease import NodeView, TaskStatus, TaskView
from dure.core.model import Evidence, Gpu, Node, NodeHealth
from dure.ports import (
    Beat,
    Exited,
    Freed,
    LeaseExpired,
    LeaseKey,
    LiveLease,
    LivePhase,
    Observation,
    Resumed,
    Returned,
    Started,
)

NEVER_STARTED = Evidence(stderr_tail="stopped before it started")


class _Told(msgspec.Struct):
    """What has been said of one lease."""

    started: bool = False
    lost: bool = False
    exited: bool = False
    freed: bool = False

    @property
    def phase(self) -> LivePhase:
        if self.exited or self.lost or self.freed:
            return LivePhase.ENDED
        return LivePhase.RUNNING if self.started else LivePhase.STARTING


class Mirror:
    """Leases whose end is not recorded yet. Its owner holds the lock."""

    def __init__(self) -> None:
        self._told: dict[LeaseKey, _Told] = {}
        self._fenced: set[LeaseKey] = set()

    def launched(self, key: LeaseKey) -> None:
        """A lease that was just put into the queue."""
        self._told.setdefault(key, _Told())

    def fenced(self, key: LeaseKey) -> None:
        """Say nothing of it any more."""
        self._fenced.add(key)
        self._told.pop(key, None)

    def settled(self, key: LeaseKey) -> None:
        """Its end is recorded."""
        self._told.pop(key, None)

    def leases(self) -> list[LiveLease]:
        """All that is held."""
        return [LiveLease(key=key, phase=told.phase) for key, told in self._told.items()]

    def take(self, view: TaskView, ahead_ms: int) -> Iterator[Observation]:
        """What is new in a view; `ahead_ms` is how far the queue's clock is ahead of ours."""
        key = LeaseKey(job=view.job, epoch=view.epoch)
        if key in self._fenced:
            return
        first = key not in self._told
        told = self._told.setdefault(key, _Told())
        for observation in _news(key, view, told, first=first):
            at_ms = observation.at_ms - ahead_ms
            yield msgspec.structs.replace(observation, at_ms=at_ms)


_Timed = Started | Beat | LeaseExpired | Returned | Resumed | Exited | Freed


def _news(key: LeaseKey, view: TaskView, told: _Told, *, first: bool) -> Iterator[_Timed]:
    if view.started_ms and not told.started:
        told.started = True
        yield Started(key=key, at_ms=view.started_ms)
    # A loss and a return between two looks have changed nothing.
    lost = view.expired_ms > view.resumed_ms
    if lost and not told.lost:
        told.lost = True
        if told.started:
            # The charge of a lost lease ends with the last beat.
            yield Beat(key=key, at_ms=view.seen_ms)
        yield _loss(key, view)
    elif not lost and (told.lost or (first and view.resumed_ms)):
        told.lost = False
        yield Resumed(key=key, at_ms=view.resumed_ms)
    if view.done_ms and not told.exited:
        told.exited = True
        yield Exited(key=key, at_ms=view.done_ms, evidence=_evidence(view))
    if view.freed_ms and not told.freed and (told.exited or told.lost):
        told.freed = True
        yield Freed(key=key, at_ms=view.freed_ms)


def _loss(key: LeaseKey, view: TaskView) -> LeaseExpired | Returned:
    if view.returned:
        return Returned(key=key, at_ms=view.expired_ms)
    return LeaseExpired(
        key=key, at_ms=view.expired_ms, node_state=view.expired_state, detail=view.detail
    )


def _evidence(view: TaskView) -> Evidence:
    if view.status is TaskStatus.CANCELLED:
        return NEVER_STARTED
    return decode_result(view.result).evidence


class NodeMirror:
    """Nodes as the engine knows them; only what matters to it counts as a change."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}

    def take(self, views: tuple[NodeView, ...], to_ours: Callable[[int], int]) -> list[Node]:
        """Nodes that are new or have changed."""
        changed = []
        for view in views:
            node = node_of(view, to_ours)
            old = self.nodes.get(node.name)
            self.nodes[node.name] = node
            quiet = msgspec.structs.replace
            if old is None or quiet(old, last_seen_ms=0) != quiet(node, last_seen_ms=0):
                changed.append(node)
        for gone in self.nodes.keys() - {view.report.node for view in views}:
            del self.nodes[gone]  # removed by an administrator
        return changed


def node_of(view: NodeView, to_ours: Callable[[int], int]) -> Node:
    """A node from the queue; an unreadable list of GPUs is a node without any."""
    report = view.report
    try:
        gpus = msgspec.json.decode(report.gpus, type=tuple[Gpu, ...])
    except msgspec.MsgspecError:
        gpus = ()
    until_ms = view.penalty_until_ms
    return Node(
        name=report.node,
        backend="edge",
        gpus=gpus,
        health=view.state or NodeHealth.SUSPECTED,
        ready=view.ready,
        penalty_until_ms=to_ours(until_ms) if until_ms else 0,
        last_seen_ms=to_ours(view.last_seen_ms),
        cores=report.cores,
        memory_mib=report.memory_mib,
        reserve_mib=report.reserve_mib,
    )
