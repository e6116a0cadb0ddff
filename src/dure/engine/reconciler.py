"""Takes in what backends report, and makes store and machines agree after a restart.

One transaction a batch. Everything from outside carries its epoch; what is not current is
kept as evidence and discarded. Observations may come twice: each is applied once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog

from dure.core.account import LOST, close, lose
from dure.core.errors import IllegalTransition
from dure.core.events import Event, EventName
from dure.core.lifecycle import JobEvent, allowed, step
from dure.core.maintenance import dispatches
from dure.core.model import (
    ACTIVE,
    PROMOTED_WAIT,
    TERMINAL,
    WAITING,
    Attempt,
    Evidence,
    Job,
    JobId,
    JobState,
    Node,
    NodeHealth,
    NodeId,
    Outcome,
    RetryOn,
    UserId,
)
from dure.core.reservation import settle
from dure.core.retry import conclude, judge, started, waited
from dure.engine.applier import launch, launch_order, unix_uid_of
from dure.engine.engine import Engine
from dure.engine.work import Work
from dure.ports import (
    Beat,
    ComputeBackend,
    Exited,
    Freed,
    GpuChanged,
    LaunchResult,
    LeaseExpired,
    LeaseKey,
    NodeChanged,
    Observation,
    Resumed,
    Returned,
    Started,
    StopKind,
    StopOrder,
)

log = structlog.get_logger("dure.reconciler")

_EVENT_OF = {
    JobState.COMPLETED: EventName.JOB_COMPLETED,
    JobState.FAILED: EventName.JOB_FAILED,
    JobState.TIMED_OUT: EventName.JOB_TIMED_OUT,
    JobState.CANCELLED: EventName.JOB_CANCELLED,
    JobState.DEAD: EventName.JOB_DEAD,
}
_WAIT_EVENT_OF = {
    Outcome.GPU_OOM: EventName.JOB_OOM_ESCALATED,
    Outcome.NODE_LOST: EventName.JOB_NODE_LOST,
    Outcome.LAUNCH_REFUSED: EventName.JOB_LAUNCH_REFUSED,
}


def collect(engine: Engine, cursors: dict[str, int]) -> int:
    """Record what all backends have observed; cursors move only after the commit."""
    count = 0
    for name, backend in engine.backends.items():
        seen, cursor = backend.observe(cursors.get(name, 0))
        if seen:
            record(engine, seen)
            count += len(seen)
        cursors[name] = cursor
    return count


def record(engine: Engine, observations: Sequence[Observation]) -> None:
    """Apply observations in one transaction; promote into the slots they free."""
    with engine.change("record") as work:
        recorder = _Recorder(engine, work)
        work.load(o.key.job for o in observations if hasattr(o, "key"))
        for observation in observations:
            recorder.take(observation)
        work.promote(recorder.freed_slots)
    for name, keys in recorder.to_fence.items():
        engine.backends[name].fence(keys)


def record_refusals(engine: Engine, results: Sequence[LaunchResult]) -> None:
    """Launches that were refused: the attempt is over, the job is back in line."""
    if not results:
        return
    with engine.change("record") as work:
        recorder = _Recorder(engine, work)
        for result in results:
            recorder.refused(result)
        work.promote(recorder.freed_slots)


class _Recorder:
    """Applies observations to the jobs of one transaction."""

    def __init__(self, engine: Engine, work: Work) -> None:
        self.engine = engine
        self.work = work
        self.freed_slots: set[UserId] = set()
        self._nodes: dict[NodeId, Node] = {}
        self.to_fence: dict[str, list[LeaseKey]] = {}

    def take(self, seen: Observation) -> None:
        match seen:
            case NodeChanged() | GpuChanged():
                self._pool(seen)
            case _:
                try:
                    self._lease(seen)
                except IllegalTransition as error:
                    # One report that cannot be must not keep all others out for ever.
                    log.error("observation_refused", job=seen.key.job, error=str(error))  # noqa: TRY400

    def _lease(
        self, seen: Started | Resumed | Exited | Freed | Beat | Returned | LeaseExpired
    ) -> None:
        attempt = self.work.attempt(seen.key.job, seen.key.epoch)
        job = self.work.job(seen.key.job)
        if attempt is None or job is None:
            log.warning("observation_of_unknown_lease", job=seen.key.job, epoch=seen.key.epoch)
            return
        match seen:
            case Started():
                self._started(job, attempt, seen.at_ms)
            case Beat():
                self._beat(attempt, seen.at_ms)
            case Exited():
                self._exited(job, attempt, seen)
            case Freed():
                self._freed(job, attempt, seen.at_ms)
            case LeaseExpired(node_state=NodeHealth.SUSPECTED):
                # Decided when the node is STABLE or OFFLINE; the backend says so then.
                log.warning("lease_expired_while_suspected", job=seen.key.job)
            case LeaseExpired():
                if seen.detail:
                    attempt = msgspec.structs.replace(attempt, detail=seen.detail[:500])
                gone = seen.node_state is NodeHealth.OFFLINE
                self._lost(job, attempt, Outcome.NODE_LOST if gone else Outcome.LEASE_EXPIRED)
            case Returned():
                bye = msgspec.structs.replace(attempt, detail="bye")
                self._lost(job, bye, Outcome.NODE_LOST)
            case Resumed():
                self._resumed(job, attempt, seen)

    def _within(self, attempt: Attempt, at_ms: int) -> int:
        """A backend's time, held between the attempt's last known time and now."""
        earliest = max(attempt.dispatched_ms, attempt.started_ms or 0)
        return max(earliest, min(at_ms, self.work.now_ms))

    def _started(self, job: Job, attempt: Attempt, at_ms: int) -> None:
        # What a lost lease tells late still counts as a start (JOB_ATTEMPT).
        late = attempt.outcome in LOST and job.state in PROMOTED_WAIT
        if attempt.started_ms is not None or (attempt.ended_ms is not None and not late):
            return
        if attempt.epoch != job.epoch:
            self._stale(job, attempt, "started")
            return
        at_ms = self._within(attempt, at_ms)
        self.work.put_attempt(
            msgspec.structs.replace(attempt, started_ms=at_ms, last_seen_ms=at_ms)
        )
        if job.state is JobState.DISPATCHED:
            job = started(job, at_ms)
        else:
            job = msgspec.structs.replace(job, starts=job.starts + 1, started_ms=at_ms)
        self.work.put(job, EventName.JOB_STARTED, start_no=attempt.start_no)

    def _beat(self, attempt: Attempt, at_ms: int) -> None:
        if attempt.ended_ms is None:
            seen_ms = self._within(attempt, at_ms)
            self.work.put_attempt(msgspec.structs.replace(attempt, last_seen_ms=seen_ms))

    def _exited(self, job: Job, attempt: Attempt, seen: Exited) -> None:
        late = attempt.outcome in LOST
        if attempt.ended_ms is not None and not late:
            return
        if attempt.epoch != job.epoch:
            self._stale(job, attempt, "exited")
            return
        at_ms = self._within(attempt, seen.at_ms)
        attempt = msgspec.structs.replace(attempt, ended_ms=at_ms, evidence=seen.evidence)
        if attempt.started_ms is None:
            why = seen.evidence.stderr_tail.strip()[-500:]
            attempt = msgspec.structs.replace(attempt, detail=why)
        outcome = self._outcome(job, attempt, seen.evidence)
        if late and not (job.state in PROMOTED_WAIT and _ends(job, outcome)):
            # The loss has been dealt with: what would only repeat the job adds nothing.
            self.work.put_attempt(attempt)
            return
        if late:
            job = self._settled(job)
        self._conclude(job, attempt, outcome)

    def _outcome(self, job: Job, attempt: Attempt, evidence: Evidence) -> Outcome:
        stopped = self._stopped(job, attempt)
        if stopped is None and attempt.started_ms is None:
            return Outcome.LAUNCH_REFUSED  # its place could not be made: not the job's fault
        return stopped or judge(evidence, cancelled=False)

    def _lost(self, job: Job, attempt: Attempt, outcome: Outcome) -> None:
        if attempt.ended_ms is not None:
            return
        if attempt.epoch != job.epoch or job.state not in ACTIVE:
            self._stale(job, attempt, "lease_expired")
            return
        if attempt.started_ms is None and outcome is Outcome.LEASE_EXPIRED:
            # Never acknowledged: the node's fault, as a refusal (policy 5).
            outcome = Outcome.LAUNCH_REFUSED
        attempt = msgspec.structs.replace(attempt, ended_ms=self.work.now_ms, outcome=outcome)
        if outcome in LOST:
            lost = lose(job, attempt, self.work.now_ms)
            self.work.book(lost.entries)
            job, attempt = lost.job, lost.attempt
        self._conclude(job, attempt, self._stopped(job, attempt) or outcome, seen_as=outcome)

    @staticmethod
    def _stopped(job: Job, attempt: Attempt) -> Outcome | None:
        """What was asked of the attempt decides what becomes of the job, however it ends."""
        if job.state is JobState.CANCELLING:
            return Outcome.CANCELLED
        return Outcome.DRAINED if attempt.stop == StopKind.DRAIN.value else None

    def _settled(self, job: Job) -> Job:
        """Charge what a waiting job has reserved: its lost attempt has come back."""
        settled = settle(job, self.work.now_ms)
        self.work.book(settled.entries)
        return settled.job

    def _resumed(self, job: Job, attempt: Attempt, seen: Resumed) -> None:
        """The node returned and nobody re-claimed: the same lease goes on."""
        if attempt.epoch == job.epoch and attempt.ended_ms is None:
            return  # told again after a restart: it goes on already
        current = (
            attempt.epoch == job.epoch
            and attempt.outcome is Outcome.NODE_LOST
            and attempt.freed_ms is None
        )
        # In maintenance a node that returns is told to stop its old job (policy 8).
        goes_on = dispatches(self.work.tx.phase()) and allowed(job.state, JobEvent.RESUMED)
        if not (current and goes_on):
            self._stale(job, attempt, "resumed")
            return
        self.work.put_attempt(
            msgspec.structs.replace(
                attempt,
                outcome=None,
                ended_ms=None,
                last_seen_ms=self._within(attempt, seen.at_ms),
            )
        )
        after = msgspec.structs.replace(
            waited(self._settled(job), self.work.now_ms, self.engine.policy),
            state=step(job.state, JobEvent.RESUMED),
            eligible_ms=0,
            waiting_for="",
        )
        self.work.put(after, EventName.JOB_STARTED, start_no=attempt.start_no, resumed=1)

    def refused(self, result: LaunchResult) -> None:
        """A launch that was refused before any process started."""
        job = self.work.job(result.key.job)
        attempt = self.work.attempt(result.key.job, result.key.epoch)
        if job is None or attempt is None or attempt.ended_ms is not None:
            return
        if attempt.epoch != job.epoch or job.state not in ACTIVE:
            self._stale(job, attempt, "refused")
            return
        now = self.work.now_ms
        attempt = msgspec.structs.replace(attempt, ended_ms=now, detail=result.reason[:500])
        cancelled = job.state is JobState.CANCELLING
        self._conclude(job, attempt, Outcome.CANCELLED if cancelled else Outcome.LAUNCH_REFUSED)
        after = self.work.job(job.id)
        closing = self.work.attempt(attempt.job, attempt.epoch)
        assert after is not None
        assert closing is not None
        self._freed(after, closing, now)

    def _conclude(
        self, job: Job, attempt: Attempt, outcome: Outcome, seen_as: Outcome | None = None
    ) -> None:
        """The command ended: the job's next state, by the one table of core.retry.

        `seen_as` is how the attempt itself ended, where that differs: a job that is being
        cancelled may lose its lease, and is charged as what it is, a loss.
        """
        attempt = msgspec.structs.replace(attempt, outcome=seen_as or outcome)
        after = conclude(job, attempt, outcome, self.work.context, self.engine.policy)
        if after.state in WAITING and attempt.started_ms is None and attempt.segments:
            # No process started and the job waits on: its segments wait with it.
            after = msgspec.structs.replace(after, segments=(*attempt.segments, *after.segments))
            attempt = msgspec.structs.replace(attempt, segments=())
        self.work.put_attempt(attempt)
        name = _EVENT_OF.get(after.state) or _WAIT_EVENT_OF.get(outcome, EventName.JOB_RETRYING)
        self.work.put(after, name, outcome=outcome.value, epoch=attempt.epoch)
        if after.state in TERMINAL:
            self.freed_slots.add(job.user)

    def _freed(self, job: Job, attempt: Attempt, at_ms: int) -> None:
        """GPUs seen free: they are idle, and the charge is booked, in this transaction."""
        if attempt.freed_ms is not None:
            return
        if attempt.ended_ms is None:
            # Free without an end: the backend lost the record of it.
            self._lost(job, attempt, Outcome.LEASE_EXPIRED)
            job, attempt = self._reread(job, attempt)
        freed_ms = max(self._within(attempt, at_ms), attempt.booked_to_ms or 0)
        settled = close(job, attempt, freed_ms)
        self.work.book(settled.entries)
        self.work.put_attempt(msgspec.structs.replace(attempt, freed_ms=freed_ms, segments=()))
        self.work.free(settled.job, attempt.epoch)

    def _reread(self, job: Job, attempt: Attempt) -> tuple[Job, Attempt]:
        newer, closing = self.work.job(job.id), self.work.attempt(attempt.job, attempt.epoch)
        assert newer is not None
        assert closing is not None
        return newer, closing

    def _stale(self, job: Job, attempt: Attempt, what: str) -> None:
        """Evidence of a lease that is not current: kept in the log, stopped, discarded."""
        self.work.tell(
            job,
            EventName.JOB_EVENT_REFUSED,
            {"epoch": attempt.epoch, "what": what, "state": job.state.value},
        )
        backend = self.engine.backend_of(attempt.placement.node)
        if backend is not None:
            key = LeaseKey(job=attempt.job, epoch=attempt.epoch)
            self.to_fence.setdefault(backend.name, []).append(key)

    def _pool(self, seen: NodeChanged | GpuChanged) -> None:
        with self.engine.world.lock:
            # What this batch has changed is not in the world before the commit.
            nodes = {**self.engine.world.pool.nodes, **self._nodes}
        if isinstance(seen, NodeChanged):
            old = nodes.get(seen.node.name)
            node = seen.node
            if old is not None:
                # What an administrator said outlives what a backend reports.
                reason = old.drain_reason if old.drained else node.drain_reason
                node = msgspec.structs.replace(node, drained=old.drained, drain_reason=reason)
        else:
            old = nodes.get(seen.node)
            if old is None:
                return
            gpus = tuple(seen.gpu if g.index == seen.gpu.index else g for g in old.gpus)
            node = msgspec.structs.replace(old, gpus=gpus)
        if node != old:
            self._nodes[node.name] = node
            self.work.tx.put_node(node)
            self.work.emit(
                Event(
                    name=EventName.NODE_CHANGED,
                    at_ms=self.work.now_ms,
                    node_id=node.name,
                    node=node,
                )
            )


def _ends(job: Job, outcome: Outcome) -> bool:
    """Whether a late outcome ends a job that waits to be repeated anyway."""
    if outcome is Outcome.ERROR:
        return job.request.retry.on is not RetryOn.ERROR
    return outcome in (Outcome.COMPLETED, Outcome.TIMED_OUT)


# -- agreeing after a restart --------------------------------------------------------


def reconcile(engine: Engine) -> None:
    """Ask the backends what is true and finish or undo each intent.

    Relaunches what was written but never started, asks again for stops that may not have
    arrived, fences leases that no open attempt stands for, and closes attempts whose
    backend has forgotten them.
    """
    with engine.store.read() as tx:
        opened = tx.open_attempts()
        jobs = tx.jobs({a.job for a in opened})
    for name, backend in engine.backends.items():
        known = {live.key: live for live in backend.leases()}
        mine = [a for a in opened if engine.backend_of(a.placement.node) is backend]
        keys = {LeaseKey(job=a.job, epoch=a.epoch) for a in mine}
        strange = [key for key in known if key not in keys]
        if strange:
            backend.fence(_not_closed(engine, strange))
        _ask_again(engine, backend, [a for a in mine if _key(a) in known])
        over = [_key(a) for a in mine if _key(a) in known and _given_up(jobs.get(a.job), a)]
        if over:
            backend.fence(over)
        missing = [a for a in mine if _key(a) not in known]
        if missing and not backend.inventory().unreachable:
            _missing(engine, name, missing, jobs)


def _key(attempt: Attempt) -> LeaseKey:
    return LeaseKey(job=attempt.job, epoch=attempt.epoch)


def _given_up(job: Job | None, attempt: Attempt) -> bool:
    """A lost lease whose job ended, was held or runs elsewhere: none of it is wanted any more."""
    if attempt.ended_ms is None or attempt.outcome not in LOST:
        return False
    current = job is not None and job.epoch == attempt.epoch
    return not (current and job is not None and job.state in PROMOTED_WAIT)


def _not_closed(engine: Engine, keys: Sequence[LeaseKey]) -> list[LeaseKey]:
    """Leases that were closed properly need no fence; read again, for they move."""
    with engine.store.read() as tx:
        found = [(key, tx.attempt(key.job, key.epoch)) for key in keys]
    return [key for key, attempt in found if attempt is None]


def _ask_again(engine: Engine, backend: ComputeBackend, attempts: Sequence[Attempt]) -> None:
    orders = [
        StopOrder(
            key=_key(a), kind=StopKind(a.stop), kill_after_s=engine.kill_after_s(StopKind(a.stop))
        )
        for a in attempts
        if a.stop and a.ended_ms is None
    ]
    if orders:
        backend.stop(orders)


def _missing(
    engine: Engine, name: str, attempts: Sequence[Attempt], jobs: dict[JobId, Job]
) -> None:
    """Open attempts that their backend does not know."""
    again, gone = [], []
    for attempt in attempts:
        job = jobs.get(attempt.job)
        waits = attempt.started_ms is None and not attempt.stop and attempt.ended_ms is None
        if job is not None and waits and job.epoch == attempt.epoch:
            with engine.store.read() as tx:
                uid = unix_uid_of(tx, job.user)
            nodes = engine.world.pool.nodes
            again.append(launch_order(job, attempt, nodes, engine.policy.stop_kill_s, uid))
        else:
            gone.append(attempt)
    record_refusals(engine, launch(engine, again))
    if gone:
        log.warning("leases_forgotten_by_backend", backend=name, leases=len(gone))
        with engine.change("reconcile") as work:
            recorder = _Recorder(engine, work)
            for attempt in gone:
                fresh = work.attempt(attempt.job, attempt.epoch)
                job = work.job(attempt.job)
                if fresh is not None and job is not None:
                    _close_forgotten(recorder, job, fresh)
            work.promote(recorder.freed_slots)


def _close_forgotten(recorder: _Recorder, job: Job, attempt: Attempt) -> None:
    """Nothing of it runs: a stop that was asked for before the start is done."""
    now = recorder.work.now_ms
    if attempt.ended_ms is None and attempt.started_ms is None and attempt.stop:
        ended = msgspec.structs.replace(attempt, ended_ms=now)
        cancelled = job.state is JobState.CANCELLING
        recorder._conclude(job, ended, Outcome.CANCELLED if cancelled else Outcome.DRAINED)
        job, attempt = recorder._reread(job, attempt)
    recorder._freed(job, attempt, now)
