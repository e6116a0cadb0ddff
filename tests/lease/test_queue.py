"""What control plane and agents may rely on with every lease queue."""

from __future__ import annotations

import threading

import pytest

from dure.core.lease import (
    BeatAnswer,
    Bye,
    Claim,
    Commit,
    End,
    Enqueued,
    LeaseBeat,
    LeaseVerdict,
    NodeMark,
    NodeReport,
    Projection,
    Report,
    SweepRule,
    Swept,
    Task,
    TaskStatus,
    TaskView,
    Ticket,
)
from dure.core.model import JobId, NodeHealth, NodeId
from dure.ports import LeaseKey, StopKind, StopOrder

S = TaskStatus
N1, N2 = NodeId("n1"), NodeId("n2")


def task(job: int, epoch: int = 1, node: str = "n1", **more) -> Task:
    payload = f"{job}/{epoch}".encode()
    return Task(job=JobId(job), epoch=epoch, node=NodeId(node), payload=payload, **more)


def key(job: int, epoch: int = 1) -> LeaseKey:
    return LeaseKey(job=JobId(job), epoch=epoch)


def state(rig, node: str, health: NodeHealth, **more) -> None:
    rig.queue.mark([NodeMark(node=NodeId(node), state=health, ready=True, **more)])


def put(rig, job: int, epoch: int = 1, **more) -> None:
    assert rig.queue.enqueue([task(job, epoch, **more)]) == [Enqueued.QUEUED]


def take(rig, node: str = "n1", lease_id: str = "lease") -> Ticket:
    (claim,) = rig.queue.claim(NodeId(node), [lease_id])
    return claim.ticket


def held(rig, job: int, epoch: int = 1, node: str = "n1") -> Ticket:
    """A task enqueued, claimed and running on a stable node."""
    state(rig, node, NodeHealth.STABLE)
    put(rig, job, epoch, node=node)
    ticket = take(rig, node, f"lease-{job}-{epoch}")
    assert beat(rig, ticket, age_ms=0, node=node) == BeatAnswer.OK
    return ticket


def verdict(rig, ticket: Ticket, age_ms: int | None = None, node: str = "n1") -> LeaseVerdict:
    report = NodeReport(node=NodeId(node), sample=1)
    reply = rig.queue.beat(report, [LeaseBeat(ticket=ticket, started_age_ms=age_ms)])
    return reply.verdicts[0]


def beat(rig, ticket: Ticket, age_ms: int | None = None, node: str = "n1") -> BeatAnswer:
    return verdict(rig, ticket, age_ms, node).answer


def report(rig, ticket: Ticket, end: End = End.DONE, **more) -> Commit:
    return rig.queue.report([Report(ticket=ticket, end=end, **more)])[0]


def sweep(rig, **more) -> Swept:
    run_id = rig.queue.sweep(SweepRule()).run_id
    return rig.queue.sweep(SweepRule(run_id=run_id, **more))


def view(rig, job: int) -> TaskView | None:
    return next((t for t in rig.queue.changes(0).tasks if t.job == job), None)


def status(rig, job: int) -> TaskStatus | None:
    found = view(rig, job)
    return found.status if found else None


def expire(rig, ticket: Ticket, node_state: NodeHealth, node: str = "n1") -> None:
    state(rig, node, node_state)
    rig.lose_beat(ticket.job)
    (expired,) = sweep(rig, brake=False).expired
    assert (expired.job, expired.epoch, expired.state) == (ticket.job, ticket.epoch, node_state)


# -- a life ----------------------------------------------------------------------------


def test_a_whole_life(rig):
    put(rig, 1)
    assert status(rig, 1) is S.PENDING
    assert rig.queue.claim(N1, ["a"]) == [
        Claim(ticket=Ticket(job=JobId(1), epoch=1, lease_id="a"), payload=b"1/1")
    ]
    assert status(rig, 1) is S.DISPATCHED
    ticket = Ticket(job=JobId(1), epoch=1, lease_id="a")
    assert beat(rig, ticket) is BeatAnswer.OK
    assert status(rig, 1) is S.DISPATCHED
    assert beat(rig, ticket, age_ms=50) is BeatAnswer.OK
    seen = view(rig, 1)
    assert seen.status is S.RUNNING
    assert -100 < rig.now_ms() - seen.started_ms - 50 < 1000
    assert report(rig, ticket, result=b"{}", age_ms=20) is Commit.OK
    assert report(rig, ticket, result=b"{}", freed_age_ms=0) is Commit.DUP
    seen = view(rig, 1)
    assert (seen.status, seen.result) == (S.DONE, b"{}")
    assert seen.started_ms <= seen.done_ms <= seen.freed_ms <= rig.now_ms()
    rig.queue.settle([key(1)])
    assert rig.queue.changes(0).tasks == ()


def test_enqueue_is_idempotent_and_epochs_only_rise(rig):
    put(rig, 1, 3)
    assert rig.queue.enqueue([task(1, 3), task(1, 2)]) == [Enqueued.KNOWN, Enqueued.STALE]
    assert take(rig).epoch == 3
    assert rig.queue.enqueue([task(1, 3)]) == [Enqueued.KNOWN]
    assert rig.queue.claim(N1, ["b"]) == []
    put(rig, 1, 4)
    assert take(rig, lease_id="c").epoch == 4


def test_claims_go_to_their_node_in_order(rig):
    rig.queue.enqueue([task(1), task(2, node="n2"), task(3), task(4)])
    assert [c.ticket.job for c in rig.queue.claim(N1, ["a", "b"])] == [1, 3]
    assert [c.ticket.job for c in rig.queue.claim(N1, ["c", "d"])] == [4]
    assert [c.ticket.job for c in rig.queue.claim(N2, ["e"])] == [2]
    assert rig.queue.claim(N2, ["f"]) == []


def test_claim_takes_its_vram_at_once(rig):
    rig.queue.beat(NodeReport(node=N1, sample=1, free_vram_mib=24_000), [])
    put(rig, 1, need_vram_mib=10_000)
    take(rig)
    (node,) = rig.queue.nodes().nodes
    assert node.report.free_vram_mib == 14_000


def test_doors_are_rung(rig):
    assert not rig.queue.doorbell(N1, 0.01)
    put(rig, 1)
    put(rig, 2)
    assert rig.queue.doorbell(N1, 1)
    assert not rig.queue.doorbell(N1, 0.01)
    assert rig.queue.news(1)
    rig.queue.changes(0)
    assert not rig.queue.news(0.01)
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(rig.queue.doorbell(N2, 5)))
    waiting.start()
    put(rig, 3, node="n2")
    waiting.join(5)
    assert answers == [True]


def test_changes_come_after_their_cursor(rig):
    rig.queue.enqueue([task(1), task(2), task(3)])
    first = rig.queue.changes(0, 2)
    assert [t.job for t in first.tasks] == [1, 2]
    rest = rig.queue.changes(first.cursor, 2)
    assert [t.job for t in rest.tasks] == [3]
    assert rig.queue.changes(rest.cursor).tasks == ()
    assert rig.queue.changes(rest.cursor).cursor == rest.cursor
    held_ticket = take(rig)
    beat(rig, held_ticket, age_ms=0)
    assert [t.job for t in rig.queue.changes(rest.cursor).tasks] == [1]


# -- fencing ---------------------------------------------------------------------------


def test_fenced_before_it_exists_never_starts(rig):
    rig.queue.fence([key(1, 2)])
    assert rig.queue.enqueue([task(1, 1), task(1, 2), task(1, 3)]) == [
        Enqueued.FENCED,
        Enqueued.FENCED,
        Enqueued.QUEUED,
    ]
    assert take(rig).epoch == 3


def test_fenced_in_line_is_taken_out(rig):
    put(rig, 1)
    rig.queue.fence([key(1)])
    assert rig.queue.claim(N1, ["a"]) == []
    assert rig.queue.changes(0).tasks == ()


def test_fenced_while_held_is_lost_and_its_result_discarded(rig):
    ticket = held(rig, 1)
    rig.queue.doorbell(N1, 0.01)
    rig.queue.fence([key(1)])
    assert rig.queue.doorbell(N1, 1), "its agent is rung"
    assert beat(rig, ticket, age_ms=0) is BeatAnswer.LOST
    assert report(rig, ticket, result=b"x", freed_age_ms=0) is Commit.STALE
    assert view(rig, 1) is None


def test_an_old_fence_does_not_touch_a_newer_dispatch(rig):
    old = held(rig, 1)
    put(rig, 1, 2)
    rig.queue.fence([key(1, 1)])
    new = take(rig, lease_id="new")
    assert beat(rig, old) is BeatAnswer.LOST
    assert beat(rig, new) is BeatAnswer.OK
    assert report(rig, old) is Commit.STALE
    assert report(rig, new) is Commit.OK


@pytest.mark.parametrize("wrong", [{"epoch": 2}, {"lease_id": "other"}, {"lease_id": ""}])
def test_only_the_lease_in_force_counts(rig, wrong):
    ticket = held(rig, 1)
    fields = {"job": ticket.job, "epoch": ticket.epoch, "lease_id": ticket.lease_id, **wrong}
    forged = Ticket(**fields)
    assert beat(rig, forged) is BeatAnswer.LOST
    assert report(rig, forged) is Commit.STALE
    assert status(rig, 1) is S.RUNNING


def test_unknown_tasks_are_answered(rig):
    ghost = Ticket(job=JobId(9), epoch=1, lease_id="x")
    assert beat(rig, ghost) is BeatAnswer.LOST
    assert report(rig, ghost) is Commit.GONE
    rig.queue.cancel([StopOrder(key=key(9), kind=StopKind.CANCEL, kill_after_s=1)])
    rig.queue.settle([key(9)])
    rig.queue.requeue([JobId(9)])
    assert rig.queue.changes(0).tasks == ()


# -- ends ------------------------------------------------------------------------------


def test_a_repeated_result_is_told_apart_from_another(rig):
    ticket = held(rig, 1)
    assert report(rig, ticket, result=b"a") is Commit.OK
    assert report(rig, ticket, result=b"a") is Commit.DUP
    assert report(rig, ticket, result=b"b") is Commit.DIFFERS
    assert view(rig, 1).result == b"a"


@pytest.mark.parametrize(
    ("end", "expected", "node_state"),
    [
        (End.REFUSED, S.FAILED, NodeHealth.STABLE),
        (End.BROKEN, S.FAILED, NodeHealth.STABLE),
        (End.GONE, S.NODE_WAIT, NodeHealth.OFFLINE),
    ],
)
def test_failures_by_their_holder(rig, end, expected, node_state):
    ticket = held(rig, 1)
    assert report(rig, ticket, end, detail="why") is Commit.OK
    seen = view(rig, 1)
    assert (seen.status, seen.expired_state, seen.detail) == (expected, node_state, "why")
    assert seen.freed_ms == 0
    assert report(rig, ticket, end, freed_age_ms=0) is Commit.OK
    assert report(rig, ticket, End.FREED, freed_age_ms=0) is Commit.DUP
    assert view(rig, 1).freed_ms > 0


def test_freed_alone_ends_nothing(rig):
    ticket = held(rig, 1)
    assert report(rig, ticket, End.FREED, freed_age_ms=0) is Commit.OK
    assert status(rig, 1) is S.RUNNING


def test_cancel_reaches_the_holder_once_rung(rig):
    ticket = held(rig, 1)
    rig.queue.doorbell(N1, 0.01)
    stop = StopOrder(key=key(1), kind=StopKind.CANCEL, kill_after_s=300)
    rig.queue.cancel([stop, StopOrder(key=key(1), kind=StopKind.LOST, kill_after_s=1)])
    assert rig.queue.doorbell(N1, 1)
    told = verdict(rig, ticket, age_ms=0)
    assert (told.answer, told.stop, told.kill_after_s) == (BeatAnswer.CANCEL, "cancel", 300)
    assert status(rig, 1) is S.RUNNING
    assert sweep(rig).expired == ()
    assert report(rig, ticket) is Commit.OK


def test_cancel_of_what_nobody_claimed_ends_it(rig):
    put(rig, 1)
    rig.queue.cancel([StopOrder(key=key(1), kind=StopKind.CANCEL, kill_after_s=1)])
    seen = view(rig, 1)
    assert seen.status is S.CANCELLED
    assert seen.done_ms == seen.freed_ms > 0
    assert rig.queue.claim(N1, ["a"]) == []


# -- loss ------------------------------------------------------------------------------


def test_beats_keep_a_lease(redis_server):
    from tests.lease.servers import RIGS

    for kind in RIGS.values():
        rig = kind(redis_server, ttl_s=0.3)
        ticket = held(rig, 1)
        for _ in range(4):
            rig.sleep(0.15)
            assert beat(rig, ticket, age_ms=0) is BeatAnswer.OK
            assert sweep(rig).expired == ()
        rig.sleep(0.4)
        assert [e.job for e in sweep(rig).expired] == [1]
        rig.close()


def test_blame_is_decided_by_the_node(rig):
    ticket = held(rig, 1)
    state(rig, "n1", NodeHealth.SUSPECTED)
    rig.lose_beat(1)
    assert sweep(rig).expired == ()
    assert status(rig, 1) is S.RUNNING
    expire(rig, ticket, NodeHealth.STABLE)
    assert status(rig, 1) is S.FAILED
    assert sweep(rig).expired == ()


def test_a_node_nobody_has_looked_at_is_not_blamed(rig):
    put(rig, 1)
    take(rig)
    rig.lose_beat(1)
    assert sweep(rig).expired == ()


def test_resumed_when_nobody_took_it(rig):
    ticket = held(rig, 1)
    expire(rig, ticket, NodeHealth.OFFLINE)
    assert status(rig, 1) is S.NODE_WAIT
    assert beat(rig, ticket, age_ms=0) is BeatAnswer.RESUMED
    seen = view(rig, 1)
    assert seen.status is S.RUNNING
    assert seen.resumed_ms >= seen.expired_ms > 0
    assert beat(rig, ticket, age_ms=0) is BeatAnswer.OK
    assert sweep(rig).expired == ()
    assert report(rig, ticket) is Commit.OK


def test_not_resumed_after_a_failure_or_a_new_dispatch(rig):
    failed = held(rig, 1)
    expire(rig, failed, NodeHealth.STABLE)
    assert beat(rig, failed, age_ms=0) is BeatAnswer.LOST
    waiting = held(rig, 2)
    expire(rig, waiting, NodeHealth.OFFLINE)
    put(rig, 2, 2)
    assert beat(rig, waiting, age_ms=0) is BeatAnswer.LOST
    assert status(rig, 2) is S.PENDING


@pytest.mark.parametrize("node_state", [NodeHealth.OFFLINE, NodeHealth.STABLE])
def test_late_result_is_taken_while_nobody_has_the_task(rig, node_state):
    ticket = held(rig, 1)
    expire(rig, ticket, node_state)
    assert report(rig, ticket, result=b"late") is Commit.OK
    assert view(rig, 1).result == b"late"
    assert sweep(rig).expired == ()
    rig.queue.project([Projection(job=JobId(1), epoch=1, status=S.FAILED, due_ms=1)])
    assert status(rig, 1) is S.DONE


def test_late_result_after_a_new_dispatch_is_stale(rig):
    ticket = held(rig, 1)
    expire(rig, ticket, NodeHealth.OFFLINE)
    put(rig, 1, 2, node="n2")
    assert report(rig, ticket, result=b"late") is Commit.STALE
    assert report(rig, take(rig, "n2", "z"), result=b"good") is Commit.OK
    assert view(rig, 1).result == b"good"


def test_never_acknowledged_is_taken_back(rig):
    state(rig, "n1", NodeHealth.STABLE)
    put(rig, 1)
    put(rig, 2)
    take(rig)
    assert sweep(rig, ack_ms=10_000).expired == ()
    rig.sleep(0.05)
    assert [e.job for e in sweep(rig, ack_ms=20).expired] == [1, 2]
    assert [view(rig, 1).freed_ms > 0, view(rig, 2).freed_ms > 0] == [False, True]
    assert rig.queue.claim(N1, ["a"]) == []


def test_brake_holds_when_half_would_expire(rig):
    tickets = [held(rig, job) for job in range(1, 7)]
    for ticket in tickets[:3]:
        rig.lose_beat(ticket.job)
    braked = sweep(rig)
    assert (braked.braked, braked.expired) == (3, ())
    assert len(sweep(rig, brake=False).expired) == 3


def test_two_losses_are_no_reason_to_brake(rig):
    for job in (1, 2):
        held(rig, job)
        rig.lose_beat(job)
    assert len(sweep(rig).expired) == 2


def test_sweep_for_another_life_does_nothing(rig):
    held(rig, 1)
    rig.lose_beat(1)
    assert rig.queue.sweep(SweepRule(run_id="of-yesterday")).expired == ()
    assert status(rig, 1) is S.RUNNING


@pytest.mark.parametrize("off_ms", [-6000, 6000])
def test_sweep_at_another_time_does_nothing(rig, off_ms):
    held(rig, 1)
    rig.lose_beat(1)
    assert sweep(rig, expected_ms=rig.now_ms() + off_ms).expired == ()
    assert len(sweep(rig, expected_ms=rig.now_ms()).expired) == 1


def test_idempotent_work_of_a_dead_node_is_taken_at_once(rig):
    put(rig, 1, idempotent=True)
    put(rig, 2)
    for lease_id in ("a", "b"):
        ticket = take(rig, lease_id=lease_id)
        beat(rig, ticket, age_ms=0)
    state(rig, "n1", NodeHealth.OFFLINE)
    assert sweep(rig).expired == ()
    state(rig, "n1", NodeHealth.OFFLINE, dead=True)
    assert [e.job for e in sweep(rig).expired] == [1]


def test_claim_lost_by_a_restart_is_taken_back_by_its_node(rig):
    ticket = held(rig, 1)
    rig.lose_claim(1)
    assert status(rig, 1) is S.PENDING
    assert beat(rig, ticket, age_ms=0, node="n2") is BeatAnswer.LOST
    assert beat(rig, ticket, age_ms=0) is BeatAnswer.RESUMED
    assert rig.queue.claim(N1, ["x"]) == []
    assert report(rig, ticket) is Commit.OK


# -- good-bye, projection, nodes -------------------------------------------------------


def test_bye_off_returns_leases_at_once(rig):
    ticket, done = held(rig, 1), held(rig, 2)
    report(rig, done)
    rig.queue.bye(N1, Bye.OFF, [ticket, done])
    seen = view(rig, 1)
    assert (seen.status, seen.returned) == (S.NODE_WAIT, True)
    assert status(rig, 2) is S.DONE
    (node,) = rig.queue.nodes().nodes
    assert (node.bye, node.state) == (Bye.OFF, NodeHealth.OFFLINE)
    beat(rig, ticket)
    assert rig.queue.nodes().nodes[0].bye is None


def test_bye_restart_keeps_leases(rig):
    ticket = held(rig, 1)
    rig.queue.bye(N1, Bye.RESTART, [ticket])
    assert status(rig, 1) is S.RUNNING
    assert rig.queue.nodes().nodes[0].bye is Bye.RESTART
    assert beat(rig, ticket) is BeatAnswer.OK


def test_projection_shows_and_starts_nothing(rig):
    ticket = held(rig, 1)
    running = Projection(job=JobId(1), epoch=1, status=S.DEAD, retries=3)
    rig.queue.project([running])
    assert status(rig, 1) is S.RUNNING
    expire(rig, ticket, NodeHealth.STABLE)
    rig.queue.project([Projection(job=JobId(1), epoch=1, status=S.FAILED, retries=1, due_ms=5)])
    assert rig.queue.claim(N1, ["a"]) == []
    rig.queue.project([running])
    assert status(rig, 1) is S.DEAD
    assert report(rig, ticket, freed_age_ms=0) is Commit.TERMINAL
    rig.queue.requeue([JobId(1)])
    assert status(rig, 1) is S.FAILED
    put(rig, 1, 2)
    assert take(rig, lease_id="n").epoch == 2


def test_settle_waits_for_the_freeing(rig):
    ticket = held(rig, 1)
    report(rig, ticket)
    rig.queue.settle([key(1)])
    assert status(rig, 1) is S.DONE
    report(rig, ticket, freed_age_ms=0)
    rig.queue.settle([key(1, 2)])
    assert status(rig, 1) is S.DONE
    rig.queue.settle([key(1)])
    assert view(rig, 1) is None


def test_nodes_tell_what_beats_and_watchdog_wrote(rig):
    told = NodeReport(
        node=N1,
        gpus=b'[{"index":0}]',
        sample=3,
        free_vram_mib=5,
        utilisation=7,
        cores=8,
        memory_mib=9,
        reserve_mib=1,
        version="v",
        address="h:1",
    )
    assert rig.queue.beat(told, []).state is None
    mark = NodeMark(node=N1, state=NodeHealth.SUSPECTED, ready=True, penalty=4, penalty_until_ms=5)
    rig.queue.mark([mark])
    assert rig.queue.beat(told, []).state is NodeHealth.SUSPECTED
    views = rig.queue.nodes()
    (node,) = views.nodes
    assert node.report == told
    assert (node.state, node.ready, node.penalty, node.penalty_until_ms) == (
        NodeHealth.SUSPECTED,
        True,
        4,
        5,
    )
    assert node.last_sample_ms <= node.last_seen_ms <= views.now_ms
    rig.queue.forget(N1)
    assert rig.queue.nodes().nodes == ()


def test_one_sample_counts_once(rig):
    rig.queue.beat(NodeReport(node=N1, sample=1), [])
    first = rig.queue.nodes().nodes[0].last_sample_ms
    rig.sleep(0.02)
    rig.queue.beat(NodeReport(node=N1, sample=1), [])
    assert rig.queue.nodes().nodes[0].last_sample_ms == first
    rig.queue.beat(NodeReport(node=N1, sample=2), [])
    assert rig.queue.nodes().nodes[0].last_sample_ms > first
