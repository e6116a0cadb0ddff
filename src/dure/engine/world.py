"""What the scheduler knows: queue index and pool, folded from the event stream."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from dure.core.events import Event
from dure.core.model import Job, JobId, JobView, Lab, LabId, Lease, Phase, User
from dure.core.placement import Pool, shape_of
from dure.core.policy import Policy
from dure.core.queues import QueueIndex
from dure.core.retry import Context
from dure.ports import Reads

WHAT_IF = JobId((1 << 63) - 1)
"""Number of a job that is only imagined: behind every real one of its lab."""


class World:
    """Queue index, pool, labs and phase at one event id.

    Rule: `lock` is taken after the store's writer lock, never before it.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.lock = threading.RLock()
        self.index = QueueIndex(policy)
        self.pool = Pool()
        self.labs: dict[LabId, Lab] = {}
        self.phase = Phase.NORMAL
        self.cycle = 0
        self.last_event_id = 0
        self.behind = False
        """Events are missing here: another server wrote them, or a COMMIT's answer was lost."""

    def load(self, tx: Reads, now_ms: int) -> None:
        """Start from the stored truth instead of folding all history."""
        with self.lock:
            last = tx.last_event_id()
            self.index.advance(now_ms)
            for event in tx.events(after=last - 1, limit=1) if last else ():
                # A clock that was set back before the restart does not turn time back.
                self.index.advance(event.at_ms)
            for tier in tx.tiers():
                self.pool.put_tier(tier)
            for node in tx.nodes():
                self.pool.put_node(node)
            for lab in tx.labs():
                self._put_lab(lab)
            for attempt in tx.open_attempts():
                lease = Lease(
                    job=attempt.job,
                    epoch=attempt.epoch,
                    placement=attempt.placement,
                    gpus=attempt.gpus,
                )
                self.pool.take(lease)
                self.index.started(lease, attempt.lab, attempt.mtflops, attempt.dispatched_ms)
            for job in tx.live_jobs():
                self.index.put(view_of(job, now_ms))
            self.phase = tx.phase()
            self.last_event_id = last

    def apply(self, events: Iterable[Event]) -> None:
        """Fold committed events, in commit order; after a gap nothing until it is closed."""
        with self.lock:
            for event in events:
                if event.id > self.last_event_id + 1:
                    self.behind = True
                    return
                if event.id == self.last_event_id + 1:
                    self._fold(event)
                    self.last_event_id = event.id

    def _fold(self, event: Event) -> None:
        self.index.advance(event.at_ms)
        if event.view is not None:
            self.index.put(event.view)
        if event.taken is not None:
            self._take(event.taken, event.lab_id, event.at_ms)
        if event.freed is not None and event.job is not None:
            self.pool.release(event.job, event.freed)
            self.index.ended(event.job, event.freed)
        if event.lab is not None:
            self._put_lab(event.lab)
        if event.tier is not None:
            self.pool.put_tier(event.tier)
        if event.node is not None:
            self.pool.put_node(event.node)
        if event.phase is not None:
            self.phase = event.phase
        if event.name.value == "node.removed" and event.node_id is not None:
            self.pool.remove_node(event.node_id)
        if event.name.value == "tier.removed" and event.tier_id is not None:
            self.pool.remove_tier(event.tier_id)

    def _take(self, lease: Lease, lab: LabId | None, at_ms: int) -> None:
        self.pool.take(lease)
        tier = self.pool.tiers.get(lease.placement.tier)
        if tier is not None and lab is not None:
            self.index.started(lease, lab, tier.mtflops, at_ms)

    def _put_lab(self, lab: Lab) -> None:
        self.labs[lab.name] = lab
        self.index.put_lab(lab)

    def context(self, now_ms: int) -> Context:
        """The pool as `core.retry` and promotion look at it."""
        with self.lock:
            return Context(now_ms=now_ms, placements=self.pool.views(now_ms))


def view_of(job: Job, now_ms: int) -> JobView:
    """A job as the scheduler sees it."""
    return JobView(
        id=job.id,
        lab=job.lab,
        user=job.user,
        state=job.state,
        shape=shape_of(job, now_ms),
        entered_ms=job.entered_ms,
        # An edit may give a promoted job a `not_before`: it waits unranked until then.
        eligible_ms=max(job.eligible_ms, job.request.not_before_ms),
        epoch=job.epoch,
        reservation=job.reservation,
    )


def slots_limit(user: User, lab: Lab | None, policy: Policy) -> int:
    """Slots of a user: user over lab over default (policy 2)."""
    if user.limits.slots is not None:
        return user.limits.slots
    if lab is not None and lab.limits.slots is not None:
        return lab.limits.slots
    return policy.slots_per_user
