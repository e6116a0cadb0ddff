"""Strict first come, first served: a yardstick, no policy of Dure's."""

from __future__ import annotations

from dure.core.floor import Floor
from dure.core.placement import Pool
from dure.core.plan import Dispatch, Plan
from dure.core.policy import Policy
from dure.core.queues import QueueIndex


def plan_strict(index: QueueIndex, pool: Pool, cycle: int, policy: Policy) -> Plan:
    """Start jobs from the front until one does not fit into what is free."""
    floor = Floor(index.snapshot(pool, cycle), policy.placement_order)
    starts: list[Dispatch] = []
    for job in index.ranked(pool):
        view = floor.best(job, None) if floor.idle else None
        if view is None:
            break
        gpus, evict = floor.pick(view, job.shape.num_gpus)
        floor.take(view.id, gpus)
        starts.append(Dispatch(job=job.id, placement=view.id, gpus=gpus, evict=evict))
    return Plan(cycle=cycle, decisions=tuple(starts), reasons={})
