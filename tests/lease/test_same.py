"""The fake and Redis answer alike: random steps on both, answer by answer."""

from __future__ import annotations

import random

import msgspec
import pytest

from dure.core.lease import (
    Bye,
    End,
    LeaseBeat,
    NodeMark,
    NodeReport,
    Projection,
    Report,
    SweepRule,
    Task,
    TaskStatus,
    TaskView,
    Ticket,
)
from dure.core.model import JobId, NodeHealth, NodeId
from dure.ports import LeaseKey, StopKind, StopOrder
from tests.lease.servers import MemoryRig, RedisRig

JOBS, NODES = 5, 2
STEPS = 400
WEIGHTS = {
    "enqueue": 6,
    "claim": 6,
    "beat": 8,
    "report": 5,
    "sweep": 4,
    "lose": 4,
    "mark": 4,
    "fence": 1,
    "cancel": 2,
    "bye": 1,
    "settle": 2,
    "project": 2,
    "requeue": 1,
    "unclaim": 1,
}


def strip(view: TaskView) -> TaskView:
    """Without times; whether something has happened stays."""
    times = ("started_ms", "seen_ms", "expired_ms", "resumed_ms", "done_ms", "freed_ms")
    return msgspec.structs.replace(view, **{n: int(bool(getattr(view, n))) for n in times})


class Walk:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tickets = [Ticket(job=JobId(1), epoch=1, lease_id="forged")]

    def key(self) -> LeaseKey:
        return LeaseKey(job=JobId(self.random.randint(1, JOBS)), epoch=self.random.randint(1, 6))

    def node(self) -> NodeId:
        return NodeId(f"n{self.random.randint(1, NODES)}")

    def step(self) -> tuple[str, tuple]:
        key, chance, node = self.key(), self.random, self.node()
        ticket = chance.choice(self.tickets[-8:])
        kind = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        match kind:
            case "enqueue":
                task = Task(job=key.job, epoch=key.epoch, node=node, payload=b"p")
                return kind, ([msgspec.structs.replace(task, idempotent=chance.random() < 0.3)],)
            case "claim":
                return kind, (node, [f"{chance.getrandbits(32):x}" for _ in range(2)])
            case "beat":
                age = chance.choice([None, 0])
                beat = LeaseBeat(ticket=ticket, started_age_ms=age)
                return kind, (NodeReport(node=node, sample=chance.randint(1, 3)), [beat])
            case "report":
                end = chance.choices(list(End), [4, 1, 1, 1, 1])[0]
                freed = chance.choice([None, 0])
                text = chance.choice([b"a", b"b"])
                started = chance.choice([None, 0])
                told = Report(ticket=ticket, end=end, result=text, freed_age_ms=freed)
                return kind, ([msgspec.structs.replace(told, started_age_ms=started)],)
            case "mark":
                state = chance.choice(list(NodeHealth))
                dead = chance.random() < 0.3
                return kind, ([NodeMark(node=node, state=state, ready=True, dead=dead)],)
            case "fence" | "settle":
                return kind, ([key],)
            case "cancel":
                return kind, ([StopOrder(key=key, kind=StopKind.CANCEL, kill_after_s=3)],)
            case "bye":
                return kind, (node, chance.choice(list(Bye)), [ticket])
            case "project":
                status = chance.choice([TaskStatus.FAILED, TaskStatus.NODE_WAIT, TaskStatus.DEAD])
                return kind, ([Projection(job=key.job, epoch=key.epoch, status=status)],)
            case "requeue":
                return kind, ([key.job],)
        return kind, (key.job,)


def apply(rig, kind: str, args: tuple) -> object:
    if kind == "lose":
        return rig.lose_beat(*args)
    if kind == "unclaim":
        views = [t for t in rig.queue.changes(0).tasks if t.job == args[0]]
        if views and views[0].status is TaskStatus.DISPATCHED:
            rig.lose_claim(*args)
        return None
    if kind == "sweep":
        run_id = rig.queue.sweep(SweepRule()).run_id
        swept = rig.queue.sweep(SweepRule(run_id=run_id, ack_ms=3_600_000))
        return sorted(swept.expired, key=lambda e: e.job), swept.braked
    return getattr(rig.queue, kind)(*args)


@pytest.mark.parametrize("seed", range(20))
def test_both_answer_alike(seed, redis_server):
    fake, real = MemoryRig(), RedisRig(redis_server)
    walk = Walk(seed)
    answered = set()
    try:
        for number in range(STEPS):
            kind, args = walk.step()
            fake.sleep(0.001)
            mine, theirs = apply(fake, kind, args), apply(real, kind, args)
            where = f"step {number}: {kind}{args}"
            assert mine == theirs, where
            if kind == "claim":
                walk.tickets += [claim.ticket for claim in mine]
            answered.add(f"{kind} {mine}" if kind in ("report", "enqueue") else kind)
            views = [
                sorted(map(strip, rig.queue.changes(0).tasks), key=lambda v: v.job)
                for rig in (fake, real)
            ]
            assert views[0] == views[1], where
            assert fake.queue.doorbell("n1", 0) == real.queue.doorbell("n1", 0)
        assert len(answered) > 15
    finally:
        real.close()
