"""The order in which one cycle looks at its candidates.

With `charging = lookahead` a lab moves back in the line as soon as one of its jobs starts in
this cycle, so that a first arrival cannot flood an idle pool; otherwise the order is the
snapshot's. A job that goes out of turn (age, blocks) is noted where it was looked at.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from dure.core.fairshare import use_key
from dure.core.model import JobId, JobView, LabId
from dure.core.plan import LabKey, Snapshot
from dure.core.policy import Charging, Policy


class Line:
    """An iterator over candidates that listens to what is started and what went before."""

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self._snapshot = snapshot
        self._policy = policy
        self._moves = policy.charging is Charging.LOOKAHEAD
        self._seen: dict[JobId, None] = {}
        self._labs = {k.lab: k for k in snapshot.lab_keys}
        self._ahead_micro: dict[LabId, int] = {}
        self._turn_of: JobId | None = None
        self._out_of_turn = False

    def __iter__(self) -> Iterator[JobView]:
        """Jobs by lab, time and id; those that were looked at out of turn are left out."""
        for job in self._moving() if self._moves else self._snapshot.candidates:
            if job.id not in self._seen:
                self._turn_of = job.id
                yield job

    def _moving(self) -> Iterator[JobView]:
        waiting: dict[LabId, deque[JobView]] = {}
        for job in self._snapshot.candidates:
            waiting.setdefault(job.lab, deque()).append(job)
        heap = [self._turn(lab, jobs[0]) for lab, jobs in waiting.items()]
        heapq.heapify(heap)
        while heap:
            key, _, _, lab = heap[0]
            jobs = waiting[lab]
            if key != self.key(lab):
                heapq.heapreplace(heap, self._turn(lab, jobs[0]))
                continue
            yield jobs.popleft()
            if jobs:
                heapq.heapreplace(heap, self._turn(lab, jobs[0]))
            else:
                heapq.heappop(heap)

    def _turn(self, lab: LabId, job: JobView) -> tuple[int, int, JobId, LabId]:
        return (self.key(lab), job.entered_ms, job.id, lab)

    def key(self, lab: LabId) -> int:
        """A lab's order key at this point of the cycle."""
        known = self._labs.get(lab) or LabKey(lab=lab, key=0)
        if not self._moves:
            return known.key
        use = known.use_micro + self._ahead_micro.get(lab, 0)
        return use_key(use, known.weight, self._snapshot.now_ms, self._policy.half_life_ms)

    def looked_at(self, job: JobId) -> bool:
        """Whether the job has had its turn in this cycle."""
        return job in self._seen

    def look_at(self, job: JobView) -> None:
        """Note that a job is decided on now, in its turn or before it."""
        self._seen[job.id] = None
        self._out_of_turn |= job.id != self._turn_of

    def started(self, job: JobView, mtflops: int) -> None:
        """Count what a started job will cost within the horizon."""
        if self._moves:
            cost = round(job.shape.num_gpus * mtflops * self._policy.lookahead_s * 1000)
            self._ahead_micro[job.lab] = self._ahead_micro.get(job.lab, 0) + cost

    def order(self) -> tuple[JobId, ...]:
        """Ids in the order looked at, where it is not the snapshot's own."""
        return tuple(self._seen) if self._moves or self._out_of_turn else ()
