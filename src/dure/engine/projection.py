"""Shows in the lease queue what the store decided after a loss.

Whoever reads the queue (an operator, an older tool, a node that returns) sees status,
retries and due time as documented. Nothing becomes runnable by it: the way out of every
wait is planner, intent, enqueue.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import structlog

from dure.core.events import Event, EventName
from dure.core.lease import Projection, QueueAway, TaskStatus
from dure.core.model import WAITING, Attempt, Job, JobId, JobState, NodeId, Outcome
from dure.engine.engine import Engine
from dure.ports import LeaseQueue

log = structlog.get_logger("dure.projection")

_SHOWN = frozenset(
    {
        EventName.JOB_NODE_LOST,
        EventName.JOB_NODE_WAIT,
        EventName.JOB_NODE_BACK,
        EventName.JOB_RETRYING,
        EventName.JOB_LAUNCH_REFUSED,
        EventName.JOB_FAILED,
        EventName.JOB_CANCELLED,
        EventName.JOB_DEAD,
    }
)


class Projector:
    """One thread behind the event stream; what the queue did not take now is kept."""

    def __init__(self, engine: Engine, queue: LeaseQueue, backend: str) -> None:
        self._engine = engine
        self._queue = queue
        self._backend = backend
        self._lock = threading.Lock()
        self._jobs: set[JobId] = set()
        self._retried: set[JobId] = set()
        self._removed: set[NodeId] = set()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="dure-projection", daemon=True)
        engine.store.subscribe(self.take)

    def start(self) -> None:
        """Follow the events until `close`."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def take(self, events: Iterable[Event]) -> None:
        """Note what a commit has changed; called inside it, so nothing is asked here."""
        with self._lock:
            for event in events:
                if event.name is EventName.NODE_REMOVED and event.node_id is not None:
                    self._removed.add(event.node_id)
                if event.job is None:
                    continue
                if event.name is EventName.JOB_RETRIED:
                    self._retried.add(event.job)
                elif event.name in _SHOWN:
                    self._jobs.add(event.job)
        self._wake.set()

    def _loop(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                self.show()
            except QueueAway as error:
                log.info("projection_waits", error=str(error))
                self._closed.wait(1)
                self._wake.set()

    def show(self) -> None:
        """Write what has been noted; on QueueAway all of it stays noted."""
        with self._lock:
            jobs, retried, removed = set(self._jobs), set(self._retried), set(self._removed)
        tasks = [task for job in jobs if (task := self._projection(job)) is not None]
        self._queue.project(tasks)
        self._queue.requeue(sorted(job for job in retried if self._is_ours(job)))
        for node in removed:
            self._queue.forget(node)
        with self._lock:
            self._jobs -= jobs
            self._retried -= retried
            self._removed -= removed

    def _is_ours(self, job: JobId) -> bool:
        with self._engine.store.read() as tx:
            attempts = tx.attempts(job)
        return bool(attempts) and self._on_edge(attempts[-1])

    def _on_edge(self, attempt: Attempt) -> bool:
        backend = self._engine.backend_of(attempt.placement.node)
        return backend is not None and backend.name == self._backend

    def _projection(self, job_id: JobId) -> Projection | None:
        """The task of a job's newest attempt, if it was on an edge node."""
        with self._engine.store.read() as tx:
            job = tx.job(job_id)
            attempt = tx.attempt(job_id, job.epoch) if job is not None else None
        if job is None or attempt is None or not self._on_edge(attempt):
            return None
        status = task_status(job, attempt)
        if status is None:
            return None
        return Projection(
            job=job.id,
            epoch=attempt.epoch,
            status=status,
            retries=job.retries,
            due_ms=job.eligible_ms,
            node_wait_count=job.node_wait_count,
            node_lost_count=job.node_lost_count,
        )


def task_status(job: Job, attempt: Attempt) -> TaskStatus | None:
    """How a job that waits or is over stands in the queue; None: it runs, or has a result.

    After a node loss the task stays NODE_WAIT whatever the job does meanwhile: that is what
    lets the same lease go on when the node returns.
    """
    if job.state in WAITING:
        lost = attempt.outcome is Outcome.NODE_LOST
        return TaskStatus.NODE_WAIT if lost else TaskStatus.FAILED
    if job.state is JobState.CANCELLED:
        return TaskStatus.CANCELLED
    return TaskStatus.DEAD if job.state in (JobState.DEAD, JobState.FAILED) else None
