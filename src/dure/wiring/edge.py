"""Edge nodes put together from the settings: the server's half and the agent's half."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from dure.adapters.compute.edge.backend import EdgeBackend
from dure.adapters.probe import prober
from dure.core.errors import DureError, ErrorCode
from dure.core.health import Detection, HealthRule
from dure.core.lease import QueueAway
from dure.core.model import Node, NodeId
from dure.engine.engine import Engine
from dure.engine.projection import Projector
from dure.engine.watchdog import Watchdog
from dure.ports import Clock
from dure.settings import Settings

if TYPE_CHECKING:
    from dure.adapters.lease.redis import RedisLeaseQueue

log = structlog.get_logger("dure.edge")


class Edge:
    """What a server needs for edge nodes: queue, backend and watchdog."""

    def __init__(
        self, settings: Settings, state_dir: Path, clock: Clock, on_node: Callable[[Node], None]
    ) -> None:
        edge = settings.edge
        refuse_forgetful(settings)
        self._queue = open_queue(settings)
        rule = health_rule(settings)
        self._watchdog = Watchdog(
            self._queue, prober(edge.probe, edge.probe_timeout_s), clock, rule, tick_s=edge.tick_s
        )
        self.backend = EdgeBackend(
            self._queue,
            clock,
            logs=state_dir / "edge-logs",
            shared_runs=Path(edge.shared_runs) if edge.shared_runs else None,
            poll_s=edge.tick_s,
            on_node=on_node,
        )
        self._projector: Projector | None = None
        self._watchdog.start()

    def show(self, engine: Engine) -> None:
        """Show in the queue what this engine decides."""
        self._projector = Projector(engine, self._queue, self.backend.name)
        self._projector.start()

    def close(self) -> None:
        """Stop watching; the backend is closed with the others."""
        if self._projector is not None:
            self._projector.close()
        self._watchdog.close()


def open_queue(settings: Settings, agent: NodeId | None = None) -> RedisLeaseQueue:
    """The queue of the settings; `agent` names the connections of a node."""
    edge = settings.edge
    try:
        from dure.adapters.lease.redis import RedisLeaseQueue  # noqa: PLC0415 - an extra
    except ImportError as error:
        value = "needs the packages of the edge extra: pip install 'dure[edge]'"
        raise DureError(ErrorCode.BAD_SETTING, key="edge.redis_url", value=value) from error
    try:
        return RedisLeaseQueue(
            edge.redis_url, prefix=edge.key_prefix, ttl_s=edge.lease_ttl_s, agent=agent
        )
    except ValueError as error:
        raise DureError(ErrorCode.BAD_SETTING, key="edge.redis_url", value=str(error)) from error


def queue_faults(settings: Settings) -> list[str]:
    """How this Redis must not be run; raises `QueueAway` when it does not answer."""
    queue = open_queue(settings)
    try:
        return queue.faults()
    finally:
        queue.close()


def refuse_forgetful(settings: Settings) -> None:
    """Raise BAD_SETTING for a Redis that may lose leases, unless that is allowed."""
    try:
        faults = queue_faults(settings)
    except QueueAway as error:
        log.warning("lease_queue_away", error=str(error), hint="edge nodes wait until it answers")
        return
    for fault in faults:
        log.warning("redis_is_forgetful", fault=fault)
    if faults and not settings.edge.allow_forgetful_redis:
        raise DureError(ErrorCode.BAD_SETTING, key="edge.redis_url", value=" ".join(faults))


def health_rule(settings: Settings) -> HealthRule:
    """The watchdog's numbers from the settings."""
    edge = settings.edge
    return HealthRule(
        detection=Detection(edge.detection),
        beat_s=edge.beat_s,
        overdue_s=edge.overdue_s,
        burst_s=edge.burst_s,
        closed_grace_s=edge.closed_grace_s,
        stable_probe_s=edge.stable_probe_s,
        suspected_probe_s=edge.suspected_probe_s,
        offline_probe_s=edge.offline_probe_s,
        suspected_limit_s=edge.suspected_limit_s,
        ttl_s=edge.lease_ttl_s,
        stale_s=edge.sample_stale_s,
        ack_s=edge.ack_s,
        penalty_fall=edge.penalty_fall,
        penalty_half_life_s=edge.penalty_half_life_s,
        penalty_stop=edge.penalty_stop,
        penalty_free=edge.penalty_free,
    )


def own_address(settings: Settings) -> str:
    """The address of this machine on the way to Redis; a probe finds the agent there."""
    if settings.edge.agent_host:
        return settings.edge.agent_host
    where = urlsplit(settings.edge.redis_url)
    try:
        kind, *_, target = socket.getaddrinfo(
            where.hostname, where.port or 6379, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as sock:
            sock.connect(target)  # sends nothing: it only chooses the interface
            return str(sock.getsockname()[0])
    except (OSError, IndexError):
        return ""
