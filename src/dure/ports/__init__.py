"""The seams: what the engine needs of the world, as Protocols and plain values.

Every port has an adapter and a fake that ships, and one contract suite runs on both.
"""

from __future__ import annotations

from dure.ports.compute import (
    Beat,
    ComputeBackend,
    Exited,
    Freed,
    GpuChanged,
    Inventory,
    LaunchOrder,
    LaunchResult,
    LaunchStatus,
    LeaseExpired,
    LeaseKey,
    LiveLease,
    LivePhase,
    NodeChanged,
    Observation,
    Resumed,
    Returned,
    Started,
    StopKind,
    StopOrder,
)
from dure.ports.leasequeue import LeaseQueue, Prober
from dure.ports.runtime import CONTROL_FD, Grant, Inside, Runtime, RuntimeCommand
from dure.ports.site import Clock, Ids, Notifier
from dure.ports.store import AlreadyBooked, GpuTaken, JobFilter, Reads, Replay, Store, Token, Writes

__all__ = [
    "CONTROL_FD",
    "AlreadyBooked",
    "Beat",
    "Clock",
    "ComputeBackend",
    "Exited",
    "Freed",
    "GpuChanged",
    "GpuTaken",
    "Grant",
    "Ids",
    "Inside",
    "Inventory",
    "JobFilter",
    "LaunchOrder",
    "LaunchResult",
    "LaunchStatus",
    "LeaseExpired",
    "LeaseKey",
    "LeaseQueue",
    "LiveLease",
    "LivePhase",
    "NodeChanged",
    "Notifier",
    "Observation",
    "Prober",
    "Reads",
    "Replay",
    "Resumed",
    "Returned",
    "Runtime",
    "RuntimeCommand",
    "Started",
    "StopKind",
    "StopOrder",
    "Store",
    "Token",
    "Writes",
]
