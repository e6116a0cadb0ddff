"""What all use cases share: the store, the world, the clock, the backends, the hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from dure.core.errors import DureError, ErrorCode
from dure.core.maintenance import Action, gate
from dure.core.model import Job, JobId, NodeId, Role, User
from dure.core.policy import Policy
from dure.engine.faultpoints import reached
from dure.engine.outlook import Outlook
from dure.engine.work import Work
from dure.engine.world import World
from dure.ports import Clock, ComputeBackend, LeaseKey, StopKind, StopOrder, Store


class Engine:
    """One server's engine; commands, controller and queries are functions over it."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        policy: Policy,
        backends: Mapping[str, ComputeBackend],
    ) -> None:
        self.store = store
        self.clock = clock
        self.policy = policy
        self.backends = dict(backends)
        self.world = World(policy)
        self.outlook = Outlook()
        self._hint: Callable[[], None] = lambda: None
        with store.read() as tx:
            self.world.load(tx, clock.now_ms())
        store.subscribe(self.world.apply)

    def on_change(self, hint: Callable[[], None]) -> None:
        """Set whom to wake when there may be something to do; backends tell it too."""
        self._hint = hint
        for backend in self.backends.values():
            backend.watch(hint)

    def wake(self) -> None:
        """Hint that something changed; the sweep makes a lost hint harmless."""
        self._hint()

    @contextmanager
    def change(self, point: str, actor: str = "") -> Iterator[Work]:
        """One use case in one transaction; wakes the loop after the commit."""
        with self.store.write() as tx:
            work = Work(tx, self.world, self.clock.now_ms(), actor)
            yield work
            work.flush()
            reached(f"{point}.before_commit")
        reached(f"{point}.after_commit")
        self.wake()

    def catch_up(self) -> None:
        """Fold what the store has and this world has not seen."""
        world = self.world
        while world.behind:
            with self.store.read() as tx:
                events = tx.events(after=world.last_event_id, limit=1000)
            with world.lock:
                world.behind = len(events) == 1000
                world.apply(events)

    def gate(self, action: Action) -> None:
        """Raise SERVICE_MAINTENANCE when the phase does not let `action` through."""
        gate(self.world.phase, action)

    def backend_of(self, node: str) -> ComputeBackend | None:
        """The backend through which a node is reached."""
        with self.world.lock:
            known = self.world.pool.nodes.get(NodeId(node))
        return self.backends.get(known.backend) if known is not None else None

    def kill_after_s(self, kind: StopKind) -> float:
        """Seconds from SIGTERM to SIGKILL (policy 5's signal rows)."""
        if kind is StopKind.CANCEL:
            return self.policy.cancel_kill_s
        return self.policy.evict_grace_s if kind is StopKind.EVICT else self.policy.stop_kill_s

    def send_stop(self, key: LeaseKey, node: str, kind: StopKind) -> None:
        """Ask the node's backend to stop a lease; asked again by the reconciler."""
        backend = self.backend_of(node)
        if backend is not None:
            after = self.kill_after_s(kind)
            backend.stop([StopOrder(key=key, kind=kind, kill_after_s=after)])


def owned(work: Work, actor: User, job_id: JobId) -> Job:
    """The job, if `actor` may act on it; others' jobs are FORBIDDEN, unknown NOT_FOUND."""
    job = work.job(job_id)
    if job is None:
        raise DureError(ErrorCode.NOT_FOUND, kind="job", id=int(job_id))
    if actor.role is not Role.ADMIN and job.user != actor.name:
        raise DureError(ErrorCode.FORBIDDEN, action="change_job", id=int(job_id))
    return job
