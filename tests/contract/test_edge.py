"""The edge backend alone: a queue that is away, restarts, views that come late."""

from __future__ import annotations

from pathlib import Path

import pytest

from dure.adapters.clock import ManualClock
from dure.adapters.compute.edge.backend import EdgeBackend
from dure.adapters.compute.edge.mirror import Mirror
from dure.adapters.compute.edge.payload import INLINE_BYTES, encode_result
from dure.adapters.lease.memory import MemoryLeaseQueue
from dure.core.lease import (
    End,
    LeaseBeat,
    NodeMark,
    NodeReport,
    QueueAway,
    Report,
    SweepRule,
    TaskStatus,
    TaskView,
)
from dure.core.model import Evidence, JobId, NodeHealth
from dure.ports import LaunchStatus, LeaseKey, StopKind, StopOrder
from tests.contract.backends import order

KEY = LeaseKey(job=JobId(1), epoch=1)
T0 = 1_800_000_000_000


def view(**fields) -> TaskView:
    values = {"job": 1, "epoch": 1, "status": TaskStatus.RUNNING, "node": "here", **fields}
    return TaskView(**values)


def names(mirror: Mirror, seen: TaskView) -> list[str]:
    return [type(o).__name__ for o in mirror.take(seen, 0)]


LOST = {"status": TaskStatus.NODE_WAIT, "expired_ms": 20, "expired_state": NodeHealth.OFFLINE}


def test_each_thing_is_told_once_and_in_order():
    mirror = Mirror()
    assert names(mirror, view(started_ms=5)) == ["Started"]
    assert names(mirror, view(started_ms=5)) == []
    lost = view(started_ms=5, seen_ms=15, **LOST)
    assert names(mirror, lost) == ["Beat", "LeaseExpired"]
    back = view(started_ms=5, expired_ms=20, resumed_ms=30)
    assert names(mirror, back) == ["Resumed"]
    assert names(mirror, view(started_ms=5, expired_ms=20, resumed_ms=30, freed_ms=40)) == []
    over = view(status=TaskStatus.DONE, started_ms=5, done_ms=35, freed_ms=40)
    assert names(mirror, over) == ["Exited", "Freed"]


def test_loss_and_return_between_two_looks_are_nothing():
    mirror = Mirror()
    names(mirror, view(started_ms=5))
    assert names(mirror, view(started_ms=5, expired_ms=20, resumed_ms=30)) == []


def test_after_a_restart_only_what_holds_is_told():
    returned = view(started_ms=5, expired_ms=20, resumed_ms=30)
    assert names(Mirror(), returned) == ["Started", "Resumed"]
    assert names(Mirror(), view(started_ms=5, **LOST)) == ["Started", "Beat", "LeaseExpired"]


def test_a_late_view_of_a_fenced_lease_says_nothing():
    mirror = Mirror()
    mirror.launched(KEY)
    mirror.fenced(KEY)
    assert names(mirror, view(started_ms=5)) == []
    assert mirror.leases() == []


def test_times_are_told_in_our_clock():
    (started,) = Mirror().take(view(started_ms=T0 + 7_000), 7_000)
    assert started.at_ms == T0


class Away(MemoryLeaseQueue):
    away = False

    def _check(self) -> None:
        if self.away:
            raise QueueAway("cut off")

    def enqueue(self, tasks):
        self._check()
        return super().enqueue(tasks)

    def nodes(self):
        self._check()
        return super().nodes()

    def fence(self, keys):
        self._check()
        super().fence(keys)

    def cancel(self, orders):
        self._check()
        super().cancel(orders)


class Control:
    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(T0)
        self.queue = Away(self.clock)
        self.queue.beat(NodeReport(node="here", sample=1), [])
        self.folder = folder
        self.open()

    def open(self) -> None:
        self.backend = EdgeBackend(self.queue, self.clock, logs=self.folder, poll_s=3600)

    def sync(self) -> None:
        self.backend._sync()

    def seen(self) -> list:
        return [o for o in self.backend.observe(0)[0] if hasattr(o, "key")]


@pytest.fixture
def control(tmp_path):
    made = Control(tmp_path)
    yield made
    made.backend._closed.set()


def test_away_concludes_nothing(control):
    control.queue.away = True
    (answer,) = control.backend.launch([order("runs", 1)])
    assert answer.status is LaunchStatus.UNKNOWN
    assert control.backend.leases() == []
    with pytest.raises(QueueAway):
        control.sync()
    control.backend._lost(QueueAway("cut off"))
    assert "cut off" in control.backend.inventory().unreachable
    control.backend.stop([StopOrder(key=KEY, kind=StopKind.CANCEL, kill_after_s=1)])
    control.backend.fence([KEY])
    control.queue.away = False
    control.sync()
    assert control.backend.inventory().unreachable == ""
    (answer,) = control.backend.launch([order("runs", 1)])
    assert answer.status is LaunchStatus.REFUSED, "the fence has arrived first"


def test_what_cannot_go_into_the_queue_is_refused(control):
    big = {"HUGE": "x" * INLINE_BYTES}
    answers = control.backend.launch(
        [
            order("runs", 1, env=big),
            order("runs", 2, command=()),
            order("runs", 3, epoch=2),
        ]
    )
    assert [a.status.value for a in answers] == ["refused", "refused", "accepted"]
    assert str(INLINE_BYTES) in answers[0].reason
    (older,) = control.backend.launch([order("runs", 3, epoch=1)])
    assert older.status is LaunchStatus.REFUSED


def test_a_whole_loss_and_a_log(control):
    control.backend.launch([order("runs", 1)])
    (claim,) = control.queue.claim("here", ["a"])
    control.queue.beat(
        NodeReport(node="here", sample=2), [LeaseBeat(ticket=claim.ticket, started_age_ms=0)]
    )
    control.queue.mark([NodeMark(node="here", state=NodeHealth.OFFLINE, ready=False)])
    control.queue._board.lines.beats.clear()
    run_id = control.queue.sweep(SweepRule()).run_id
    control.queue.sweep(SweepRule(run_id=run_id))
    control.sync()
    assert [type(o).__name__ for o in control.seen()] == ["Started", "Beat", "LeaseExpired"]
    assert control.backend.inventory().nodes[0].health is NodeHealth.OFFLINE
    result = encode_result(Evidence(exit_code=0), b"the end\n", 1000)
    done = Report(ticket=claim.ticket, end=End.DONE, result=result, freed_age_ms=0)
    control.queue.report([done])
    control.sync()
    assert [type(o).__name__ for o in control.seen()][-2:] == ["Exited", "Freed"]
    text = Path(control.backend.log_path(KEY)).read_text()
    assert text == "dure: the first 992 bytes of this log stayed on the node\nthe end\n"
    control.open()
    assert [type(o).__name__ for o in control.seen()][-2:] == ["Exited", "Freed"]
    _, cursor = control.backend.observe(0)
    control.backend.observe(cursor)
    control.sync()
    assert control.queue.changes(0).tasks == ()


def test_a_clock_that_is_hours_off_is_translated(control):
    control.clock.advance(1)
    skewed = ManualClock(T0 - 7_200_000)
    backend = EdgeBackend(control.queue, skewed, logs=control.folder, poll_s=3600)
    (node,) = backend.inventory().nodes
    assert abs(node.last_seen_ms - skewed.now_ms()) <= 1000
    backend._closed.set()
