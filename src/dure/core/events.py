"""The event stream: one row per change, written in the change's own transaction.

Live pages, webhooks, the audit trail and the queue index all fold this one stream, so an
event carries the facts after the change, not only its name.
"""

from __future__ import annotations

from enum import StrEnum

from dure.core.model import (
    JobId,
    JobView,
    Lab,
    LabId,
    Lease,
    Node,
    NodeId,
    Phase,
    Tier,
    TierId,
    UserId,
    Value,
)


class EventName(StrEnum):
    """Every kind of event; docs/reference/events.md lists them."""

    JOB_SUBMITTED = "job.submitted"
    JOB_PROMOTED = "job.promoted"
    JOB_HELD = "job.held"
    JOB_RELEASED = "job.released"
    JOB_EDITED = "job.edited"
    JOB_REORDERED = "job.reordered"
    JOB_NODE_WAIT = "job.node_wait"
    JOB_NODE_BACK = "job.node_back"
    JOB_RESERVED = "job.reserved"
    JOB_RESERVATION_ENDED = "job.reservation_ended"
    JOB_DISPATCHED = "job.dispatched"
    JOB_STARTED = "job.started"
    JOB_LAUNCH_REFUSED = "job.launch_refused"
    JOB_RETRYING = "job.retrying"
    JOB_OOM_ESCALATED = "job.oom_escalated"
    JOB_NODE_LOST = "job.node_lost"
    JOB_CANCEL_ASKED = "job.cancel_asked"
    JOB_COMPLETED = "job.completed"
    JOB_FAILED = "job.failed"
    JOB_TIMED_OUT = "job.timed_out"
    JOB_CANCELLED = "job.cancelled"
    JOB_DEAD = "job.dead"
    JOB_RETRIED = "job.retried"
    JOB_GPUS_FREED = "job.gpus_freed"
    JOB_FIT_LOST = "job.fit_lost"
    JOB_EVENT_REFUSED = "job.event_refused"
    LAB_CHANGED = "lab.changed"
    LAB_CHARGED = "lab.charged"
    USER_CHANGED = "user.changed"
    TIER_CHANGED = "tier.changed"
    TIER_REMOVED = "tier.removed"
    NODE_CHANGED = "node.changed"
    NODE_REMOVED = "node.removed"
    MAINTENANCE_CHANGED = "maintenance.changed"


class Event(Value, frozen=True, kw_only=True):
    """One change. `id` rises in commit order; 0 until the store has written it.

    `view` is the job as the scheduler sees it now; `taken` a lease that begins, `freed`
    the epoch whose GPUs were seen free; `lab`, `node`, `tier`, `phase` rows as they are now.
    """

    name: EventName
    at_ms: int
    id: int = 0
    job: JobId | None = None
    epoch: int = 0
    lab_id: LabId | None = None
    user: UserId | None = None
    node_id: NodeId | None = None
    tier_id: TierId | None = None
    actor: str = ""
    params: dict[str, str | int | float] = {}
    view: JobView | None = None
    taken: Lease | None = None
    freed: int | None = None
    lab: Lab | None = None
    node: Node | None = None
    tier: Tier | None = None
    phase: Phase | None = None
