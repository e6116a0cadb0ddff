"""The lease queue over Redis: one script call a step, every transition conditional.

Rule: no step is more than one script, and no time comes from this machine's clock. Scripts
are loaded by their hash and loaded again when a restarted Redis has forgotten them.
"""

from __future__ import annotations

import hashlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dure.adapters.lease import answers
from dure.core.lease import (
    BeatReply,
    Bye,
    Changes,
    Claim,
    Commit,
    Enqueued,
    LeaseBeat,
    NodeMark,
    NodeReport,
    NodeViews,
    Projection,
    QueueAway,
    Report,
    SweepRule,
    Swept,
    Task,
    Ticket,
)
from dure.core.model import JobId, NodeId
from dure.ports import LeaseKey, StopOrder

T = TypeVar("T")
Args = Sequence[str | bytes | int]

SCRIPTS = (
    "enqueue",
    "claim",
    "beat",
    "report",
    "cancel",
    "fence",
    "sweep",
    "bye",
    "changes",
    "settle",
    "project",
    "requeue",
    "mark",
)
SCAN = 512
"""Entries of the line that one claim looks at: more than an installation has GPUs."""
AGENT = "dure-agent:"
"""How agents name their connections: a closed one is news before its beat is overdue."""
BLOCK_S = 60.0
"""Longest single wait at a door: an idle node asks 1,440 times a day."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""A dead connection is noticed while it waits; the kernel's own time is two hours."""


class Scripts:
    """Source and hash of every script, read once."""

    def __init__(self) -> None:
        folder = files("dure.adapters.lease") / "scripts"
        prelude = (folder / "prelude.lua").read_text("utf-8")
        self.source = {
            name: prelude + (folder / f"{name}.lua").read_text("utf-8") for name in SCRIPTS
        }
        self.sha = {
            name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            for name, text in self.source.items()
        }


class Lines:
    """Connections for scripts, one call at a time each.

    A step is one short round trip: the client's own bookkeeping would cost as much as the
    step itself. A connection that fails is closed, and opened anew when it is next used.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool
        self._free: deque[Any] = deque()

    def call(self, *command: str | bytes | int) -> Any:
        """Answer of one command."""
        try:
            line = self._free.pop()
        except IndexError:
            line = self._pool.make_connection()
        try:
            line.send_command(*command)
            answer = line.read_response()
        except redis.exceptions.ResponseError:
            raise
        except BaseException:
            line.disconnect()  # half an answer may still be on its way
            raise
        finally:
            # Also a closed one: a pool makes only so many in its life.
            self._free.append(line)
        return answer

    def close(self) -> None:
        """Close those that are not in use."""
        while self._free:
            self._free.pop().disconnect()


class RedisLeaseQueue:
    """`LeaseQueue` on one Redis (or one cluster slot, with a prefix like `{dure}:`)."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "dure:",
        ttl_s: float = 90.0,
        timeout_s: float = 5.0,
        agent: NodeId | None = None,
    ) -> None:
        self._prefix = prefix
        self._ttl_ms = round(ttl_s * 1000)
        self._scripts = Scripts()
        options: dict[str, Any] = {
            "socket_connect_timeout": timeout_s,
            "socket_keepalive": True,
            "socket_keepalive_options": KEEPALIVE,
            "retry": Retry(NoBackoff(), 0),
            "client_name": AGENT + quote(agent, safe="") if agent else None,
        }
        self._redis = redis.Redis.from_url(url, socket_timeout=timeout_s, **options)
        self._lines = Lines(self._redis.connection_pool)
        # A read that times out before the block ends would lose what was popped.
        self._door = redis.Redis.from_url(url, socket_timeout=BLOCK_S + timeout_s, **options)

    # -- control plane --

    def enqueue(self, tasks: Sequence[Task]) -> list[Enqueued]:
        """Put dispatches into the line."""
        calls = [answers.enqueue_args(task) for task in tasks]
        return [Enqueued(a.decode()) for a in self._batch("enqueue", calls)]

    def cancel(self, orders: Sequence[StopOrder]) -> None:
        """Ask for stops; holders are told with their next beat, and rung."""
        calls = [
            (int(o.key.job), o.key.epoch, answers.stop_text(o.kind.value, o.kill_after_s))
            for o in orders
        ]
        self._batch("cancel", calls)

    def fence(self, keys: Sequence[LeaseKey]) -> None:
        """Make these epochs worth nothing, for ever."""
        self._batch("fence", [(int(k.job), k.epoch) for k in keys])

    def sweep(self, rule: SweepRule) -> Swept:
        """Expire what nobody keeps alive."""
        judged = (rule.run_id, rule.ack_ms, rule.limit, int(rule.brake))
        args = (*judged, rule.expected_ms, rule.jump_ms)
        return answers.swept(self._repeat("sweep", args))

    def changes(self, after: int, limit: int = 1000) -> Changes:
        """What changed after a cursor."""
        return answers.changes(self._repeat("changes", (after, limit)), after)

    def settle(self, keys: Sequence[LeaseKey]) -> None:
        """Forget leases whose ends are recorded."""
        if keys:
            self._repeat("settle", [n for k in keys for n in (int(k.job), k.epoch)])

    def project(self, tasks: Sequence[Projection]) -> None:
        """Show what the store decided."""
        self._batch("project", [answers.projection_args(task) for task in tasks])

    def requeue(self, jobs: Sequence[JobId]) -> None:
        """Forget counts after a retry by hand."""
        self._batch("requeue", [(int(job),) for job in jobs])

    def nodes(self) -> NodeViews:
        """All nodes that have ever sent a beat."""

        def read() -> NodeViews:
            found = self._redis.smembers(f"{self._prefix}node:names")
            names = sorted(str(n, "utf-8") if isinstance(n, bytes) else n for n in found)
            pipe = self._redis.pipeline(transaction=False)
            pipe.time()
            for name in names:
                pipe.hgetall(f"{self._prefix}node:state:{name}")
            (seconds, micros), *hashes = pipe.execute()
            now_ms = seconds * 1000 + micros // 1000
            return answers.node_views(now_ms, dict(zip(names, hashes, strict=True)))

        return self._guard(read, again=True)

    def mark(self, marks: Sequence[NodeMark]) -> None:
        """Write verdicts on nodes."""
        self._batch("mark", [(m.node, *answers.mark_fields(m)) for m in marks])

    def forget(self, node: NodeId) -> None:
        """A node that an administrator has removed."""

        def remove() -> None:
            self._redis.srem(f"{self._prefix}node:names", node)
            self._redis.delete(f"{self._prefix}node:state:{node}")

        self._guard(remove, again=True)

    def connected(self) -> frozenset[NodeId] | None:
        """Nodes whose agents hold a connection: a killed agent's is gone in milliseconds."""
        found = self._guard(lambda: self._redis.client_list(_type="normal"), again=True)
        names = (client.get("name", "") for client in found)
        return frozenset(
            NodeId(unquote(name.removeprefix(AGENT))) for name in names if name.startswith(AGENT)
        )

    def news(self, timeout_s: float) -> bool:
        """Wait for a change."""
        return self._wait(f"{self._prefix}task:news", timeout_s)

    def faults(self) -> list[str]:
        """How this Redis must not be run, a sentence each."""
        info = self._guard(self._redis.info, again=True)
        return answers.faults(info)

    # -- agent --

    def claim(self, node: NodeId, lease_ids: Sequence[str]) -> list[Claim]:
        """Take tasks for a node. Not repeated: a lost answer is noticed by its silence."""
        flat = self._call("claim", (node, self._ttl_ms, SCAN, *lease_ids))
        return [
            Claim(
                ticket=Ticket(
                    job=JobId(int(flat[i])), epoch=int(flat[i + 1]), lease_id=flat[i + 2].decode()
                ),
                payload=flat[i + 3],
            )
            for i in range(0, len(flat), 4)
        ]

    def beat(self, report: NodeReport, leases: Sequence[LeaseBeat]) -> BeatReply:
        """Keep a node and its leases alive."""
        fields = answers.report_fields(report)
        args = [report.node, self._ttl_ms, report.sample, len(fields) // 2, *fields]
        for lease in leases:
            age = -1 if lease.started_age_ms is None else lease.started_age_ms
            ticket = lease.ticket
            args += [int(ticket.job), ticket.epoch, ticket.lease_id, age]
        return answers.beat_reply(self._repeat("beat", args))

    def report(self, reports: Sequence[Report]) -> list[Commit]:
        """Commit results, failures and freed GPUs."""
        calls = [answers.report_args(report) for report in reports]
        return [Commit(a.decode()) for a in self._batch("report", calls)]

    def bye(self, node: NodeId, kind: Bye, leases: Sequence[Ticket]) -> None:
        """Leave in order."""
        flat = [x for t in leases for x in (int(t.job), t.epoch, t.lease_id)]
        self._repeat("bye", (node, kind.value, self._ttl_ms, *flat))

    def doorbell(self, node: NodeId, timeout_s: float) -> bool:
        """Wait until somebody rings for this node."""
        return self._wait(f"{self._prefix}node:wake:{node}", timeout_s)

    def close(self) -> None:
        """Let go of the connections; whoever waits at a door is told QueueAway."""
        self._lines.close()
        for client in (self._redis, self._door):
            client.connection_pool.disconnect()

    # -- inside --

    def _call(self, name: str, args: Args) -> Any:
        key = f"{self._prefix}task:queue:pending"
        try:
            try:
                return self._lines.call(
                    "EVALSHA", self._scripts.sha[name], 1, key, self._prefix, *args
                )
            except redis.exceptions.NoScriptError:
                return self._lines.call(
                    "EVAL", self._scripts.source[name], 1, key, self._prefix, *args
                )
        except redis.exceptions.RedisError as error:
            raise QueueAway(f"{name}: {error}") from error

    def _repeat(self, name: str, args: Args) -> Any:
        """A step that may come twice: a connection that a restart has cut is tried anew."""
        try:
            return self._call(name, args)
        except QueueAway as error:
            if isinstance(error.__cause__, redis.exceptions.ConnectionError):
                return self._call(name, args)
            raise

    def _batch(self, name: str, calls: Sequence[Args]) -> list[Any]:
        if len(calls) < 2:
            return [self._repeat(name, args) for args in calls]
        key = f"{self._prefix}task:queue:pending"

        def run() -> list[Any]:
            pipe = self._redis.pipeline(transaction=False)
            for args in calls:
                pipe.evalsha(self._scripts.sha[name], 1, key, self._prefix, *args)
            return pipe.execute()

        try:
            return self._guard(run, again=True)
        except QueueAway as error:
            if not isinstance(error.__cause__, redis.exceptions.NoScriptError):
                raise
        self._guard(lambda: self._redis.script_load(self._scripts.source[name]), again=True)
        return self._guard(run, again=True)

    def _wait(self, key: str, timeout_s: float) -> bool:
        if timeout_s <= 0:
            return self._guard(lambda: self._door.lpop(key), again=False) is not None
        block_s = min(timeout_s, BLOCK_S)
        return (
            self._guard(lambda: self._door.blpop([key], timeout=block_s), again=False) is not None
        )

    def _guard(self, step: Callable[[], T], *, again: bool) -> T:
        try:
            return step()
        except redis.exceptions.RedisError as error:
            if again and isinstance(error, redis.exceptions.ConnectionError):
                return self._guard(step, again=False)
            raise QueueAway(str(error)) from error
