"""Blocks (`keep_blocks`): a place where a larger job could start whole is not broken up.

GPUs of one node that free one by one are refilled by small jobs at once, so whole nodes
come back only when a large job ends. If the next in line is small, such a node is lost to
large jobs for a long time. With this rule the larger job goes first, if its lab has not used
much more: a rule of order, not of fit, so nothing is left idle by it.
"""

from __future__ import annotations

from collections import deque

from dure.core.floor import Floor
from dure.core.line import Line
from dure.core.model import JobView, LabId, Shape
from dure.core.placement import usable
from dure.core.plan import Snapshot
from dure.core.policy import Policy

_DOUBLING = 1e9
"""Order keys are log2 of use on this grid."""


class Blocks:
    """Larger jobs of one snapshot that may go before a smaller one."""

    def __init__(self, snapshot: Snapshot, policy: Policy, line: Line) -> None:
        self._line = line
        self._per_gpu = policy.block_margin * _DOUBLING
        self._waiting: dict[tuple[LabId, Shape], deque[JobView]] = {}
        if policy.keep_blocks:
            for job in snapshot.candidates:
                if job.shape.num_gpus > 1:
                    self._waiting.setdefault((job.lab, job.shape), deque()).append(job)

    def before(self, job: JobView, floor: Floor) -> JobView | None:
        """The larger job that goes first where `job` would start, or None.

        Of those that need more than half of a place which `job` would break up, and whose lab
        is the job's own or has used at most `block_margin` doublings more for each GPU of
        `job`: the largest, then by rank.
        """
        if not self._waiting or job.reservation is not None:
            return None
        view = floor.best(job, None)
        if view is None:
            return None
        need, room = job.shape.num_gpus, floor.available(view.id, job.id)
        if 2 * room <= view.capacity:
            return None
        limit = self._line.key(job.lab) + self._per_gpu * need
        found = [
            (-shape.num_gpus, key, first.entered_ms, first.id, first)
            for (lab, shape) in self._waiting
            if need < shape.num_gpus <= room < shape.num_gpus + need
            and 2 * shape.num_gpus > view.capacity
            and usable(shape, view)
            and ((key := self._line.key(lab)) <= limit or lab == job.lab)
            and (first := self._first(lab, shape)) is not None
        ]
        return min(found, key=lambda f: f[:4])[4] if found else None

    def _first(self, lab: LabId, shape: Shape) -> JobView | None:
        waiting = self._waiting[lab, shape]
        while waiting and self._line.looked_at(waiting[0].id):
            waiting.popleft()
        return waiting[0] if waiting else None
