"""What is refused, with its stable code: rights, limits, maintenance, repeated keys."""

from __future__ import annotations

import threading

import msgspec
import pytest

from dure.core.errors import DureError, ErrorCode
from dure.core.model import (
    JobRequest,
    Limits,
    Node,
    Phase,
    Role,
    User,
)
from dure.core.policy import Policy
from dure.engine import admin, commands
from tests.core.build import BIG4090, node
from tests.story import Story

E = ErrorCode


def story(gpus: int = 2, **kw: object) -> Story:
    return Story([node("n1", (BIG4090, gpus))], tiers=[BIG4090], **kw)


def refused(code: ErrorCode, act, *args: object, **kw: object) -> DureError:
    with pytest.raises(DureError) as caught:
        act(*args, **kw)
    assert caught.value.code is code
    return caught.value


def asked(**kw: object) -> JobRequest:
    return JobRequest(**{"name": "t", "lab": "BCG", "command": ("true",), **kw})


def submit(s: Story, user: User | None = None, **kw: object):
    return commands.submit(s.engine, user or s.user("bcg"), [asked(**kw)]).jobs[0]


def test_nobody_acts_on_anothers_job_and_nobody_submits_for_another_lab() -> None:
    s = story(labs={"BCG": 0, "KDG": 0})
    s.submit("job", "BCG", hold=True)
    for command in ("cancel", "hold", "release", "retry", "rerun"):
        refused(E.FORBIDDEN, s.do, command, "job", "kdg")
    refused(E.FORBIDDEN, s.edit, "job", "kdg", name="mine")
    refused(E.FORBIDDEN, submit, s, s.user("kdg"))
    assert s.job("job").request.name == "job"
    root = s.user("root")
    assert root.role is Role.ADMIN
    s.cancel("job")
    submit(s, root, lab="KDG")


def test_what_does_not_exist_is_not_found() -> None:
    s = story()
    refused(E.NOT_FOUND, commands.cancel, s.engine, s.user("root"), 77)
    refused(E.NOT_FOUND, commands.rerun, s.engine, s.user("root"), 77)
    refused(E.NOT_FOUND, submit, s, s.user("root"), lab="NIX")


def test_the_queue_limit_counts_waiting_jobs_only() -> None:
    s = story(1, policy=Policy(waiting_per_user=3, slots_per_user=2))
    for _ in range(4):
        submit(s)
        s.settle()
    assert refused(E.QUEUE_LIMIT, submit, s).params["limit"] == 3
    with pytest.raises(DureError):
        commands.submit(s.engine, s.user("root"), [asked()] * 4)
    with s.store.read() as tx:
        assert len(list(tx.all_jobs())) == 4  # all or nothing


def test_the_narrowest_of_site_lab_and_user_wins() -> None:
    s = story(8)
    lab = Limits(num_gpus=4, waiting=9, max_time_limit_s=7_200)
    admin.put_lab(s.engine, "root", "BCG", limits=lab)
    me = msgspec.structs.replace(s.user("bcg"), limits=Limits(num_gpus=2, max_time_limit_s=3_600))
    admin.put_user(s.engine, "root", me)
    assert refused(E.GPU_LIMIT, submit, s, me, num_gpus=3).params["limit"] == 2
    late = refused(E.TIME_LIMIT_TOO_LONG, submit, s, me, time_limit_s=3_601)
    assert late.params["limit_s"] == 3_600
    submit(s, me, num_gpus=2, time_limit_s=3_600)


def test_a_job_without_a_time_limit_gets_the_default_before_it_is_judged() -> None:
    s = story(policy=Policy(default_time_limit_s=60, max_time_limit_s=100))
    assert submit(s).request.time_limit_s == 60
    refused(E.TIME_LIMIT_TOO_LONG, submit, s, time_limit_s=101)


def test_an_edit_is_judged_like_a_submit() -> None:
    s = story(policy=Policy(default_time_limit_s=60, max_time_limit_s=100), labs={"BCG": 0, "K": 0})
    s.submit("job", "BCG", hold=True)
    s.edit("job", time_limit_s=None)
    assert s.job("job").request.time_limit_s == 60
    refused(E.TIME_LIMIT_TOO_LONG, s.edit, "job", time_limit_s=101)
    refused(E.FORBIDDEN, s.edit, "job", "bcg", lab="K")
    refused(E.NOT_FOUND, s.edit, "job", lab="NIX")


def test_a_job_without_any_limit_is_too_long_where_there_is_a_longest() -> None:
    s = story(policy=Policy(max_time_limit_s=100))
    refused(E.TIME_LIMIT_TOO_LONG, submit, s)


def test_a_batch_with_one_bad_request_is_refused_whole() -> None:
    s = story()
    both = [asked(), asked(num_gpus=8)]
    refused(E.NO_FIT_PLACEMENT, commands.submit, s.engine, s.user("bcg"), both)
    assert s.truth().jobs == ()


# -- maintenance ------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.ACTIVE])
def test_maintenance_refuses_work_and_active_refuses_cancel_too(phase: Phase) -> None:
    s = story(1)
    s.submit("run", "BCG", run=s.run(900))
    s.submit("job", "BCG", run=10)
    s.phase(Phase.DRAINING)
    if phase is Phase.ACTIVE:
        s.cancel("run")
        s.wait(1)
        assert s.engine.world.phase is Phase.ACTIVE
        refused(E.SERVICE_MAINTENANCE, s.cancel, "job")
    for command in ("hold", "release", "retry", "rerun"):
        refused(E.SERVICE_MAINTENANCE, s.do, command, "job", "bcg")
    refused(E.SERVICE_MAINTENANCE, s.edit, "job", name="x")
    refused(E.SERVICE_MAINTENANCE, submit, s)
    refused(E.SERVICE_MAINTENANCE, commands.reorder, s.engine, s.user("bcg"), [])
    admin.put_lab(s.engine, "root", "BCG", title="still works")
    if phase is Phase.DRAINING:
        s.cancel("job")
        assert s.state("job") == "CANCELLED"


def test_draining_holds_the_queue_and_normal_goes_on_in_the_same_order() -> None:
    s = Story([node("n1", (BIG4090, 3))], tiers=[BIG4090], labs={"BCG": 0, "KDG": 5})
    s.submit("busy", "BCG", run=100)
    s.submit("pair", "BCG", 3, run=50)
    s.submit("k", "KDG", 1, run=50)
    s.wait(50)
    order = s.order()
    s.phase(Phase.DRAINING)
    assert s.job("pair").reservation is None
    assert s.charged("pair") == 50 * 2 * 82.6
    assert s.state("busy") == "RUNNING"
    s.say("maintenance goes on by itself when the last job has ended")
    s.wait(50)
    assert s.engine.world.phase is Phase.ACTIVE
    s.wait(1_000)
    assert [s.state(n) for n in ("pair", "k")] == ["GLOBAL_QUEUE_WAIT"] * 2
    assert set(s.order()) == set(order)
    s.say("back in NORMAL the held queue dispatches by rank")
    admin.set_phase(s.engine, "root", Phase.NORMAL)
    s.settle()
    s.wait(51)
    s.check()
    s.golden("maintenance")


def test_an_administrator_may_abort_from_any_phase_and_skip_none() -> None:
    """S36: drain does not go on after it was cancelled."""
    s = story(1)
    s.submit("a", "BCG", run=900)
    refused(E.WRONG_STATE, admin.set_phase, s.engine, "root", Phase.ACTIVE)
    admin.set_phase(s.engine, "root", Phase.DRAINING)
    s.settle()
    refused(E.WRONG_STATE, admin.set_phase, s.engine, "root", Phase.BACKFILL_RECOVERY)
    admin.set_phase(s.engine, "root", Phase.NORMAL)
    s.cancel("a")
    s.wait(10)
    assert s.engine.world.phase is Phase.NORMAL
    s.submit("b", "BCG", run=10)
    assert s.state("b") == "RUNNING"


# -- idempotency -------------------------------------------------------------------------


def test_the_same_key_gives_the_same_job_and_another_body_is_refused() -> None:
    s = story()
    me = s.user("bcg")
    first = commands.submit(s.engine, me, [asked()], key="k1")
    again = commands.submit(s.engine, me, [asked()], key="k1")
    assert (first.replayed, again.replayed) == (False, True)
    assert first.jobs[0].id == again.jobs[0].id
    other = [asked(name="other")]
    refused(E.IDEMPOTENCY_MISMATCH, commands.submit, s.engine, me, other, key="k1")
    root = commands.submit(s.engine, s.user("root"), [asked()], key="k1")
    assert not root.replayed
    s.phase(Phase.DRAINING)
    assert commands.submit(s.engine, me, [asked()], key="k1").replayed


def test_twenty_threads_with_one_key_make_one_job() -> None:
    s = story()
    me, made = s.user("bcg"), []
    start = threading.Barrier(20)

    def press() -> None:
        start.wait()
        made.append(commands.submit(s.engine, me, [asked()], key="same").jobs[0].id)

    threads = [threading.Thread(target=press) for _ in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(made) == 20
    assert len(set(made)) == 1
    assert len(s.truth().jobs) == 1


def test_a_refused_submit_may_use_its_key_again() -> None:
    s = story()
    refused(
        E.NO_FIT_PLACEMENT, commands.submit, s.engine, s.user("bcg"), [asked(num_gpus=8)], key="k"
    )
    assert not commands.submit(s.engine, s.user("bcg"), [asked()], key="k").replayed


def test_nodes_are_not_confused_by_a_mixed_request() -> None:
    """P-4: 8 GPUs of 4 + 4 are refused with requests that fit, by the engine too."""
    five = msgspec.structs.replace(BIG4090, name="RTX5090", vram_gb=32)
    mixed: Node = node("m", (BIG4090, 4), (five, 4))
    s = Story([mixed], tiers=[BIG4090, five])
    error = refused(E.NO_FIT_PLACEMENT, submit, s, num_gpus=8)
    assert error.params["failed_constraint"] == "capacity"
    for nearest in error.params["nearest_requests"]:
        submit(s, num_gpus=nearest["num_gpus"], tiers=(nearest["tier"],))
