"""One transaction's changes: read once, written in batches, with their events.

Every state change passes through `Work.put`, so none can miss its event, and every charge
through `Work.book`, so none can miss its lab.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dure.core.events import Event, EventName
from dure.core.fairshare import book
from dure.core.lifecycle import JobEvent, step
from dure.core.model import (
    Attempt,
    Job,
    JobId,
    Lab,
    LabId,
    Lease,
    LedgerEntry,
    PlacementId,
    User,
    UserId,
)
from dure.core.placement import PlacementView, fits, shape_of
from dure.core.queues import next_promotable
from dure.core.retry import Context, present
from dure.engine.world import World, slots_limit, view_of
from dure.ports import Writes

Params = dict[str, str | int | float]


class Work:
    """The unit of work of one use case."""

    def __init__(self, tx: Writes, world: World, now_ms: int, actor: str = "") -> None:
        self.tx = tx
        self.world = world
        # Time never runs back: an attempt would end before it began.
        self.now_ms = max(now_ms, world.index.now_ms)
        self.actor = actor
        self._jobs: dict[JobId, Job] = {}
        self._dirty: dict[JobId, Job] = {}
        self._attempts: dict[tuple[JobId, int], Attempt] = {}
        self._new_attempts: dict[tuple[JobId, int], Attempt] = {}
        self._dirty_attempts: dict[tuple[JobId, int], Attempt] = {}
        self._entries: list[LedgerEntry] = []
        self._labs: dict[LabId, Lab] = {}
        self._events: list[Event] = []
        self._context: Context | None = None
        self._views: dict[PlacementId, PlacementView] | None = None

    @property
    def context(self) -> Context:
        """The pool of now, read once."""
        if self._context is None:
            self._context = self.world.context(self.now_ms)
        return self._context

    def placement(self, placement: PlacementId) -> PlacementView | None:
        """One placement of now."""
        if self._views is None:
            self._views = {v.id: v for v in self.context.placements}
        return self._views.get(placement)

    # -- reading through --

    def load(self, ids: Iterable[JobId]) -> None:
        """Read jobs in one query."""
        missing = [i for i in dict.fromkeys(ids) if i not in self._jobs]
        if missing:
            self._jobs.update(self.tx.jobs(missing))

    def job(self, job: JobId) -> Job | None:
        """A job with this transaction's changes."""
        if job not in self._jobs:
            self.load([job])
        return self._jobs.get(job)

    def attempt(self, job: JobId, epoch: int) -> Attempt | None:
        """An attempt with this transaction's changes."""
        key = (job, epoch)
        if key not in self._attempts:
            found = self.tx.attempt(job, epoch)
            if found is None:
                return None
            self._attempts[key] = found
        return self._attempts[key]

    # -- changing --

    def adopt(self, job: Job) -> None:
        """Know a job that this transaction has just added."""
        self._jobs[job.id] = job

    def put(self, job: Job, name: EventName, **params: str | float) -> Job:
        """Keep a changed job, with the event that says so."""
        self._jobs[job.id] = job
        self._dirty[job.id] = job
        self.tell(job, name, params)
        return job

    def tell(
        self,
        job: Job,
        name: EventName,
        params: Params | None = None,
        *,
        taken: Lease | None = None,
        freed: int | None = None,
    ) -> None:
        """Add an event about a job as it is now."""
        self._events.append(
            Event(
                name=name,
                at_ms=self.now_ms,
                job=job.id,
                epoch=job.epoch if freed is None else freed,
                lab_id=job.lab,
                user=job.user,
                actor=self.actor,
                params=params or {},
                view=view_of(job, self.now_ms),
                taken=taken,
                freed=freed,
            )
        )

    def emit(self, event: Event) -> None:
        """Add an event that is not about a job."""
        self._events.append(event)

    def add_attempt(self, job: Job, attempt: Attempt, **params: str | float) -> None:
        """Keep a dispatched job with its new attempt and lease."""
        self._jobs[job.id] = job
        self._dirty[job.id] = job
        key = (attempt.job, attempt.epoch)
        self._attempts[key] = attempt
        self._new_attempts[key] = attempt
        lease = Lease(
            job=attempt.job,
            epoch=attempt.epoch,
            placement=attempt.placement,
            gpus=attempt.gpus,
        )
        self.tell(job, EventName.JOB_DISPATCHED, params, taken=lease)

    def put_attempt(self, attempt: Attempt) -> None:
        """Keep a changed attempt."""
        key = (attempt.job, attempt.epoch)
        self._attempts[key] = attempt
        changed = self._new_attempts if key in self._new_attempts else self._dirty_attempts
        changed[key] = attempt

    def book(self, entries: Sequence[LedgerEntry]) -> None:
        """Append ledger lines and add their cost to the labs that pay."""
        for entry in entries:
            self._entries.append(entry)
            lab = self._labs.get(entry.lab) or self.tx.lab(entry.lab) or Lab(name=entry.lab)
            half_life_ms = self.world.policy.half_life_ms
            self._labs[entry.lab] = book(lab, entry.cost_micro, entry.booked_ms, half_life_ms)

    def free(self, job: Job, epoch: int) -> None:
        """Keep a job whose GPUs of `epoch` are idle from this commit on."""
        self._jobs[job.id] = job
        self._dirty[job.id] = job
        self.tell(job, EventName.JOB_GPUS_FREED, freed=epoch)

    # -- promoting --

    def promote(self, users: Iterable[UserId]) -> None:
        """Fill the free slots of `users` from their personal queues, in their order.

        Must be the last change of a use case that frees slots: it writes what came before.
        """
        for name in sorted(set(users)):
            user = self.tx.user(name) or User(name=name, lab=LabId(""))
            self._promote(user)

    def _promote(self, user: User) -> None:
        self._flush_jobs()
        lab = self.world.labs.get(user.lab)
        free = slots_limit(user, lab, self.world.policy) - self.tx.slots_used(user.name)
        if free <= 0:
            return
        waiting = self.tx.personal_queue(user.name)
        while free > 0:
            job = next_promotable(waiting, self.now_ms)
            if job is None:
                return
            waiting.remove(job)
            promoted = self._promoted(job)
            if promoted is not None:
                free -= 1

    def lend(self, job: Job) -> Job | None:
        """Promote one job beyond its user's slots (`slots_borrow`)."""
        return self._promoted(job)

    def _promoted(self, job: Job) -> Job | None:
        shape_fits = any_fit(job, self.context)
        if not shape_fits:
            # It stays where it is, marked, and its owner is told (policy 9).
            self.put(msgspec.structs.replace(job, fit_lost=True), EventName.JOB_FIT_LOST)
            return None
        there = present(job, self.context)
        event = JobEvent.PROMOTED if there else JobEvent.PROMOTED_ABSENT
        after = msgspec.structs.replace(
            job,
            state=step(job.state, event),
            entered_ms=self.now_ms,
            node_wait_since_ms=0 if there else self.now_ms,
        )
        return self.put(after, EventName.JOB_PROMOTED)

    # -- writing --

    def _flush_jobs(self) -> None:
        if self._dirty:
            self.tx.put_jobs(list(self._dirty.values()))
            for job in self._dirty:
                changed = self._jobs[job]
                self._jobs[job] = msgspec.structs.replace(changed, version=changed.version + 1)
            self._dirty.clear()

    def flush(self) -> None:
        """Write everything; the caller's transaction commits it."""
        self._flush_jobs()
        if self._new_attempts:
            self.tx.add_attempts(list(self._new_attempts.values()))
        if self._dirty_attempts:
            self.tx.put_attempts(list(self._dirty_attempts.values()))
        if self._entries:
            self.tx.add_ledger(self._entries)
        for lab in self._labs.values():
            self.tx.put_lab(lab)
            self._events.append(
                Event(name=EventName.LAB_CHARGED, at_ms=self.now_ms, lab_id=lab.name, lab=lab)
            )
        if self._events:
            self.tx.emit(self._events)


def any_fit(job: Job, context: Context) -> bool:
    """Whether any placement could ever run the job (P-1)."""
    shape = shape_of(job, context.now_ms)
    return any(fits(shape, v) for v in context.placements)
