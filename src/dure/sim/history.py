"""An installation's own past as a load: what ran, on which machines, for whom.

Approximations, told to the reader: nodes count as in service all the time unless drained,
a job's attempts are one piece of work, and holds and dependencies are not replayed.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from dure.core.fairshare import recomputed
from dure.core.model import Attempt, Job, JobId, Lab, LabId, LedgerEntry, Node, NodeHealth, TierId
from dure.core.policy import Policy
from dure.engine.world import slots_limit
from dure.ports import Reads
from dure.sim.metrics import p95
from dure.sim.refusals import Refusal, SimulationRefused
from dure.sim.texts import Note
from dure.sim.trace import Cluster, Trace, TraceJob, node_of

_DAY_MS = 86_400_000
_HOUR_MS = 3_600_000


class History(msgspec.Struct, frozen=True):
    """The load, today's machines, and what a reader must know about both."""

    trace: Trace
    cluster: Cluster
    notes: tuple[Note, ...]


class Added(msgspec.Struct, frozen=True):
    """`count` machines with `gpus` GPUs of one tier each."""

    tier: str
    gpus: int
    count: int


def parse_added(text: str) -> Added:
    """`RTX4090:8x2` as two nodes of eight; ValueError says how it is written."""
    found = re.fullmatch(r"(.+):(\d+)x(\d+)", text)
    if found is None or not (0 < int(found[2]) <= 64 and 0 < int(found[3]) <= 10_000):
        raise ValueError(f"{text!r} is not TIER:GPUSxCOUNT, such as RTX4090:8x2")
    return Added(found[1], int(found[2]), int(found[3]))


def read_history(tx: Reads, policy: Policy, since_ms: int, until_ms: int, where: str) -> History:
    """Everything that ran between two moments; refuse NO_HISTORY when nothing did."""
    reading = _Reading(since_ms, until_ms, tx.all_attempts())
    jobs = [made for job in tx.all_jobs() if (made := reading.job(job)) is not None]
    if not jobs:
        raise SimulationRefused(Refusal.NO_HISTORY, where=where)
    jobs.sort(key=lambda j: (j.submit_s, j.id))
    labs = {lab.name: lab for lab in tx.labs()}
    trace = Trace(
        jobs=tuple(jobs),
        rejected=0,
        labs=_labs_at(labs.values(), tx.ledger(), since_ms, policy.half_life_ms),
        slots=_slots(tx, labs, policy, jobs),
    )
    nodes = tx.nodes()
    drained = sum(n.drained for n in nodes)
    cluster = Cluster(tuple(tx.tiers()), tuple(_in_service(nodes)), {})
    return History(trace, cluster, (*reading.notes(), ("assumed_up", {"count": drained})))


class _Reading:
    """Turns stored jobs into jobs of a trace, and counts what is not as it was."""

    def __init__(self, since_ms: int, until_ms: int, attempts: Iterable[Attempt]) -> None:
        self.since_ms = since_ms
        self.until_ms = until_ms
        self.running_then = 0
        self.open_end = 0
        self.never_ran = 0
        self.really_h: list[float] = []
        self._attempts: dict[JobId, list[Attempt]] = defaultdict(list)
        for attempt in attempts:
            if attempt.started_ms is not None:
                self._attempts[attempt.job].append(attempt)

    def job(self, job: Job) -> TraceJob | None:
        """The job's part inside the window; None if it had none."""
        runs = self._attempts[job.id]
        held_ms = sum(self._inside_ms(a) for a in runs)
        if job.submitted_ms > self.until_ms:
            return None
        if not held_ms:
            ended_ms = job.ended_ms or self.until_ms
            self.never_ran += not runs and ended_ms > self.since_ms
            return None
        first_ms = runs[0].dispatched_ms
        measured = first_ms >= self.since_ms
        asked_ms = max(job.submitted_ms, job.request.not_before_ms)
        if measured:
            self.really_h.append(max(0, first_ms - asked_ms) / _HOUR_MS)
        self.running_then += not measured
        self.open_end += runs[-1].freed_ms is None
        return TraceJob(
            id=int(job.id),
            name=f"{job.id} {job.request.name}",
            lab=job.lab,
            user=job.user,
            submit_s=max(0, asked_ms - self.since_ms) / 1000 if measured else 0.0,
            run_s=held_ms / 1000,
            num_gpus=job.request.num_gpus,
            tiers=job.request.tiers,
            node=job.request.node or "",
            min_vram_gb=job.floor(),
            measured=measured,
        )

    def _inside_ms(self, attempt: Attempt) -> int:
        """How long the attempt held its GPUs inside the window."""
        until_ms = self.until_ms if attempt.freed_ms is None else attempt.freed_ms
        return max(0, min(until_ms, self.until_ms) - max(attempt.dispatched_ms, self.since_ms))

    def notes(self) -> list[Note]:
        """What people really waited, and the counts that are not 0."""
        counts = ("running_then", "open_end", "never_ran")
        found: list[Note] = [(k, {"count": n}) for k in counts if (n := getattr(self, k))]
        waits = sorted(self.really_h)
        if waits:
            mean = statistics.fmean(waits)
            found.insert(0, ("really", {"mean": mean, "p95": p95(waits), "jobs": len(waits)}))
        return found


def _labs_at(
    labs: Iterable[Lab], ledger: Iterable[LedgerEntry], at_ms: int, half_life_ms: float
) -> tuple[Lab, ...]:
    """Each lab with the use it had when the window began, which is time zero."""
    lines: dict[LabId, list[LedgerEntry]] = defaultdict(list)
    for entry in ledger:
        if entry.booked_ms < at_ms:
            lines[entry.lab].append(entry)
    found = (recomputed(lab, lines[lab.name], half_life_ms) for lab in labs)
    return tuple(msgspec.structs.replace(x, as_of_ms=x.as_of_ms - at_ms) for x in found)


def _slots(
    tx: Reads, labs: dict[LabId, Lab], policy: Policy, jobs: Iterable[TraceJob]
) -> dict[str, int]:
    """Personal limits; those of people who left are the policy's."""
    slots: dict[str, int] = {j.user: policy.slots_per_user for j in jobs}
    for user in tx.users():
        slots[user.name] = slots_limit(user, labs.get(user.lab), policy)
    return slots


def _in_service(nodes: Iterable[Node]) -> Iterable[Node]:
    """Nodes as if nothing were wrong with them; drained ones are left out."""
    for node in nodes:
        if not node.drained:
            gpus = tuple(msgspec.structs.replace(g, healthy=True, foreign=False) for g in node.gpus)
            yield msgspec.structs.replace(
                node, gpus=gpus, health=NodeHealth.STABLE, ready=True, penalty_until_ms=0
            )


def changed(
    cluster: Cluster, added: Sequence[Added], removed: Sequence[str]
) -> tuple[Cluster, list[Note]]:
    """Another set of machines, and how it differs; refuse UNKNOWN_TIER, UNKNOWN_NODE."""
    nodes = {str(n.name): n for n in cluster.nodes}
    notes: list[Note] = []
    for name in removed:
        if name not in nodes:
            known = ", ".join(nodes)
            raise SimulationRefused(Refusal.UNKNOWN_NODE, name=name, known=known)
        del nodes[name]
        notes.append(("removed", {"name": name}))
    tiers = [t.name for t in cluster.tiers]
    for number, new in enumerate(added, 1):
        if new.tier not in tiers:
            known = ", ".join(tiers)
            raise SimulationRefused(Refusal.UNKNOWN_TIER, name=new.tier, known=known)
        for i in range(new.count):
            # A blank cannot stand in a real node's name, so that nothing is replaced.
            name = f"new {number}.{i + 1}"
            nodes[name] = node_of(name, TierId(new.tier), new.gpus)
        notes.append(("added", {"count": new.count, "gpus": new.gpus, "tier": new.tier}))
    return Cluster(cluster.tiers, tuple(nodes.values()), cluster.weights), notes
