"""What the store decides is shown in the queue, and only shown."""

from __future__ import annotations

import pytest

from dure.adapters.lease.memory import MemoryLeaseQueue
from dure.core.lease import LeaseBeat, NodeMark, NodeReport, QueueAway, SweepRule, Task, TaskStatus
from dure.core.model import NodeHealth
from dure.engine import commands
from dure.engine.projection import Projector
from dure.engine.reconciler import record
from dure.ports import LeaseExpired, LeaseKey
from tests.core.build import R4090, node
from tests.story import Story


class Shown:
    """A story whose machines are in a queue, too, as an edge backend would keep them."""

    def __init__(self) -> None:
        self.story = Story([node("n1", (R4090, 2))])
        self.queue = MemoryLeaseQueue(self.story.clock)
        self.projector = Projector(self.story.engine, self.queue, "simulated")

    def run(self, name: str = "train", **fields: object) -> LeaseKey:
        job = self.story.submit(name, "BCG", **fields)
        self.queue.enqueue([Task(job=job.id, epoch=job.epoch or 1, node="n1", payload=b"")])
        (claim,) = self.queue.claim("n1", [name])
        beat = LeaseBeat(ticket=claim.ticket, started_age_ms=0)
        self.queue.beat(NodeReport(node="n1"), [beat])
        return LeaseKey(job=job.id, epoch=1)

    def lose(self, key: LeaseKey, state: NodeHealth) -> None:
        self.queue.mark([NodeMark(node="n1", state=state, ready=True)])
        self.queue._board.lines.beats.pop(key.job)
        run_id = self.queue.sweep(SweepRule()).run_id
        (expired,) = self.queue.sweep(SweepRule(run_id=run_id)).expired
        assert (expired.job, expired.state) == (key.job, state)
        record(self.story.engine, [LeaseExpired(key=key, at_ms=0, node_state=state)])
        self.projector.show()

    def task(self, key: LeaseKey):
        return self.queue._board.tasks[key.job]


def test_counted_failures_are_parked_until_their_retry():
    s = Shown()
    key = s.run()
    s.lose(key, NodeHealth.STABLE)
    assert (s.task(key).status, s.task(key).retries) == (TaskStatus.FAILED, 1)
    assert s.queue._board.lines.delayed[key.job] == s.story.job("train").eligible_ms > 0
    assert s.queue.claim("n1", ["x"]) == []


def test_a_lost_node_is_waited_for():
    s = Shown()
    key = s.run()
    s.lose(key, NodeHealth.OFFLINE)
    assert (s.task(key).status, s.task(key).retries) == (TaskStatus.NODE_WAIT, 0)
    assert s.queue._board.lines.parked[key.job] == "n1"


def test_used_up_and_retried_by_hand():
    s = Shown()
    key = s.run(retry=s_retry(0))
    s.lose(key, NodeHealth.STABLE)
    assert s.story.state("train") == "DEAD"
    assert s.task(key).status is TaskStatus.DEAD
    commands.retry(s.story.engine, s.story.user("root"), key.job)
    s.projector.show()
    assert (s.task(key).status, s.task(key).retries) == (TaskStatus.FAILED, 0)


def test_what_the_queue_did_not_take_is_kept(monkeypatch):
    s = Shown()
    key = s.run()

    def away(_tasks):
        raise QueueAway("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(s.queue, "project", away)
        with pytest.raises(QueueAway):
            s.lose(key, NodeHealth.STABLE)
    s.projector.show()
    assert s.task(key).retries == 1


def test_removed_nodes_are_forgotten():
    s = Shown()
    s.queue.beat(NodeReport(node="n9"), [])
    with s.story.engine.change("admin") as work:
        from dure.core.events import Event, EventName

        work.emit(Event(name=EventName.NODE_REMOVED, at_ms=work.now_ms, node_id="n9"))
    s.projector.show()
    assert [v.report.node for v in s.queue.nodes().nodes if v.report.node == "n9"] == []


def test_the_thread_follows_and_ends():
    s = Shown()
    s.projector.start()
    key = s.run()
    s.lose(key, NodeHealth.STABLE)
    s.projector.close()
    assert not s.projector._thread.is_alive()


def s_retry(most: int):
    from dure.core.model import Retry

    return Retry(max=most)
