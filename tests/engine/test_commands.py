"""What users do with jobs, in every state: what happens, what it costs, what is refused."""

from __future__ import annotations

import msgspec
import pytest

from dure.core.errors import DureError, ErrorCode
from dure.core.model import (
    Evidence,
    JobRequest,
    JobState,
    NodeHealth,
)
from dure.engine import admin, commands
from dure.ports import LeaseExpired
from tests.core.build import BIG4090, R3080TI, R4090, node
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


def in_state(state: JobState) -> Story:
    """A story whose job `job` is in `state`."""
    s = story(slots=2)
    if state is JobState.PERSONAL_QUEUE_WAIT:
        s.submit("job", "BCG", hold=True)
    elif state is JobState.GLOBAL_QUEUE_WAIT:
        s.submit("busy", "BCG", 2, run=9_000)
        s.submit("job", "BCG", run=100)
    elif state is JobState.NODE_WAIT:
        s.node("n1", drained=True)
        s.submit("job", "BCG", run=100)
    elif state is JobState.DISPATCHED:
        s.submit("job", "BCG", run=s.run(100, start_ms=60_000, save_ms=20_000))
    else:
        ends = {"FAILED": {"exit_code": 1}, "TIMED_OUT": {"timed_out": True}}
        evidence = Evidence(**ends.get(state.value, {"exit_code": 0}))
        s.submit("job", "BCG", run=s.run(100, save_ms=20_000, evidence=evidence))
        if state in (JobState.CANCELLING, JobState.CANCELLED):
            s.cancel("job")
        if state is JobState.DEAD:
            s.wait(1)
            _kill(s)
        if state not in (JobState.RUNNING, JobState.CANCELLING, JobState.DEAD):
            s.wait(100)
    assert s.state("job") == state.value
    return s


def _kill(s: Story) -> None:
    """DEAD without waiting: the retries of the job are used up."""
    with s.engine.change("edit") as work:
        job = work.job(s.jobs["job"])
        work.tx.put_jobs([msgspec.structs.replace(job, retries=9)])
    s.record(LeaseExpired(key=s.key("job"), at_ms=0, node_state=NodeHealth.STABLE))


WAITS = {JobState.PERSONAL_QUEUE_WAIT, JobState.GLOBAL_QUEUE_WAIT, JobState.NODE_WAIT}
RUNS = {JobState.DISPATCHED, JobState.RUNNING, JobState.CANCELLING}
ENDED = set(JobState) - WAITS - RUNS


@pytest.mark.parametrize("state", list(JobState))
def test_cancel_in_every_state(state: JobState) -> None:
    s = in_state(state)
    if state in ENDED:
        refused(E.ALREADY_ENDED, s.cancel, "job")
    else:
        s.cancel("job")
        wanted = "CANCELLED" if state in WAITS else "CANCELLING"
        assert s.state("job") == wanted
        if wanted == "CANCELLING":
            s.cancel("job")  # again: nothing new, and no second SIGTERM
        s.wait(20)
        assert s.state("job") == "CANCELLED"
    s.check()


@pytest.mark.parametrize("state", list(JobState))
def test_hold_in_every_state(state: JobState) -> None:
    s = in_state(state)
    if state not in WAITS:
        refused(E.WRONG_STATE, s.do, "hold", "job")
        return
    s.do("hold", "job")
    job = s.job("job")
    assert (s.state("job"), job.held, job.entered_ms) == ("PERSONAL_QUEUE_WAIT", True, 0)
    assert s.reason("job") == "HELD" or "HELD" in s.reasons("job")
    s.do("hold", "job")
    s.wait(1)
    s.node("n1", drained=False)
    s.do("release", "job")
    assert s.job("job").entered_ms == s.clock.now_ms()
    assert s.state("job") in ("GLOBAL_QUEUE_WAIT", "RUNNING")
    s.check()


@pytest.mark.parametrize("state", list(JobState))
def test_edit_in_every_state(state: JobState) -> None:
    s = in_state(state)
    if state not in WAITS:
        refused(E.WRONG_STATE, s.edit, "job", name="other")
        return
    entered = s.job("job").entered_ms
    s.wait(5)
    s.edit("job", name="other")
    assert s.job("job").request.name == "other"
    assert s.job("job").entered_ms == entered
    s.check()


@pytest.mark.parametrize("state", list(JobState))
def test_retry_in_every_state(state: JobState) -> None:
    s = in_state(state)
    if state not in (JobState.FAILED, JobState.DEAD, JobState.TIMED_OUT):
        refused(E.WRONG_STATE, s.do, "retry", "job")
        return
    cost, epoch = s.charged("job"), s.job("job").epoch
    s.wait(1_000)
    s.runs["job"] = s.run(10)
    s.do("retry", "job")
    job = s.job("job")
    assert (job.retries, job.node_lost_count, job.error, job.exit_code) == (0, 0, "", None)
    assert (s.state("job"), job.epoch) == ("RUNNING", epoch + 1)
    assert job.entered_ms == s.clock.now_ms()
    s.wait(10)
    assert s.state("job") == "COMPLETED"
    assert s.charged("job") == pytest.approx(cost + 10 * 82.6)
    s.check()


@pytest.mark.parametrize("state", list(JobState))
def test_rerun_is_a_new_job_with_the_same_request_from_any_state(state: JobState) -> None:
    s = in_state(state)
    before = s.job("job")
    (again,) = commands.rerun(s.engine, s.user("bcg"), before.id).jobs
    assert again.id != before.id
    assert again.request == before.request
    assert (again.epoch, again.starts) == (0, 0)
    s.settle()
    assert s.job("job").state is before.state
    s.check()


# -- hold, edit and the reservation ---------------------------------------------------


def reserving(gpus: int = 3, need: int = 3) -> Story:
    s = story(gpus)
    s.submit("busy", "BCG", run=9_000)
    s.submit("job", "BCG", need, run=100)
    s.submit("next", "BCG", 1, run=100)
    s.wait(30)
    assert s.job("job").reservation.count == gpus - 1
    return s


def test_hold_frees_slot_and_reservation_for_the_next() -> None:
    s = reserving()
    s.do("hold", "job")
    assert s.job("job").reservation is None
    assert s.charged("job") == 30 * 2 * 82.6
    assert s.state("next") == "RUNNING"
    s.check()


def test_hold_promotes_the_next_of_the_personal_queue() -> None:
    s = story(1, slots=2)
    for name in ("a", "b", "c"):
        s.submit(name, "BCG", run=900)
    assert s.state("c") == "PERSONAL_QUEUE_WAIT"
    s.do("hold", "b")
    assert s.state("c") == "GLOBAL_QUEUE_WAIT"
    s.check()


def test_a_smaller_request_keeps_place_and_fitting_reservation() -> None:
    s = reserving()
    entered, since = s.job("job").entered_ms, s.job("job").reservation.since_ms
    s.edit("job", name="x")
    job = s.job("job")
    assert (job.entered_ms, job.reservation.since_ms) == (entered, since)
    s.edit("job", num_gpus=2)
    assert s.state("job") == "RUNNING"
    assert s.job("job").entered_ms == entered
    s.wait(100)
    assert s.ledger("job") == [("run", 1, 200), ("reserved", 1, 60)]
    s.check()


def test_a_larger_request_enters_anew() -> None:
    s = story(4)
    s.submit("busy", "BCG", 3, run=9_000)
    s.submit("job", "BCG", 2, run=100)
    s.submit("other", "BCG", 2, run=100)
    s.wait(10)
    s.edit("job", num_gpus=3)
    assert s.job("job").entered_ms == s.clock.now_ms()
    assert s.order() == ["other", "job"]
    s.wait(5)
    s.edit("other", min_vram_gb=20.0)
    assert s.order() == ["job", "other"]
    s.check()


def test_a_reservation_that_does_not_fit_the_edit_is_released_and_charged() -> None:
    s = Story([node("n1", (R4090, 2)), node("n2", (R3080TI, 2))])
    s.submit("busy", "BCG", run=9_000, tiers=("RTX4090",))
    s.submit("busy2", "BCG", 2, run=9_000, tiers=("RTX3080Ti",))
    s.submit("job", "BCG", 2)
    s.wait(30)
    assert s.job("job").reservation is not None
    s.edit("job", tiers=("RTX3080Ti",))
    assert s.job("job").reservation is None
    assert s.charged("job") == 30 * 82.6
    s.check()


def test_an_edit_that_nothing_fits_is_refused_and_changes_nothing() -> None:
    s = reserving()
    before = s.job("job")
    refused(E.NO_FIT_PLACEMENT, s.edit, "job", num_gpus=8)
    refused(E.NO_FIT_PLACEMENT, s.edit, "job", min_vram_gb=99.0)
    assert s.job("job") == before
    s.check()


def test_a_not_before_given_by_an_edit_is_obeyed() -> None:
    s = story(1)
    s.submit("busy", "BCG", run=50)
    s.submit("job", "BCG", run=10)
    s.edit("job", not_before_ms=s.clock.now_ms() + 100_000)
    assert s.reason("job") == "NOT_BEFORE"
    s.wait(99)
    assert s.state("job") == "GLOBAL_QUEUE_WAIT"
    s.wait(1)
    assert s.state("job") == "RUNNING"
    s.check()


def test_not_before_keeps_a_job_in_the_personal_queue_and_holds_nobody_up() -> None:
    s = story(1)
    s.submit("job", "BCG", run=10, not_before_ms=s.clock.now_ms() + 60_000)
    s.submit("other", "BCG", run=10)
    assert (s.state("job"), s.state("other")) == ("PERSONAL_QUEUE_WAIT", "RUNNING")
    s.wait(55)
    assert s.state("job") == "PERSONAL_QUEUE_WAIT"
    s.wait(5)
    assert s.state("job") == "RUNNING"


def test_a_fit_that_was_lost_comes_back_by_an_edit_or_a_changed_pool() -> None:
    s = story(2, slots=1)
    s.submit("busy", "BCG", run=50)
    s.submit("job", "BCG", 2, run=10)
    s.submit("behind", "BCG", 1, run=10)
    admin.put_tier(s.engine, "root", msgspec.structs.replace(BIG4090, max_gpus=1))
    s.wait(50)
    assert (s.state("job"), s.reason("job")) == ("PERSONAL_QUEUE_WAIT", "FIT_LOST")
    assert "job.fit_lost" in s.events("job")
    assert s.state("behind") == "RUNNING"
    s.wait(10)
    admin.put_tier(s.engine, "root", BIG4090)
    s.settle()
    assert s.state("job") == "RUNNING"
    s.check()


# -- reorder --------------------------------------------------------------------------


def personal(s: Story) -> list[str]:
    names = {v: k for k, v in s.jobs.items()}
    with s.store.read() as tx:
        return [names[j.id] for j in tx.personal_queue("bcg")]


def test_reorder_puts_the_named_jobs_first() -> None:
    s = story(1, slots=1)
    for name in "abcde":
        s.submit(name, "BCG", run=10)
    commands.reorder(s.engine, s.user("bcg"), [s.jobs["e"], s.jobs["c"]])
    assert personal(s) == ["e", "c", "b", "d"]
    s.submit("f", "BCG", run=10)
    assert personal(s) == ["e", "c", "b", "d", "f"]
    s.wait(10)
    assert s.state("e") == "RUNNING"
    s.check()


def test_reorder_refuses_repeated_promoted_and_foreign_jobs() -> None:
    s = story(1, slots=1, labs={"BCG": 0, "KDG": 0})
    for name in "abc":
        s.submit(name, "BCG", run=10)
    s.submit("x", "KDG", run=10)
    s.submit("y", "KDG", run=10)
    me, reorder = s.user("bcg"), commands.reorder
    refused(E.INVALID_REQUEST, reorder, s.engine, me, [s.jobs["b"], s.jobs["b"]])
    refused(E.NOT_FOUND, reorder, s.engine, me, [s.jobs["a"]])
    refused(E.NOT_FOUND, reorder, s.engine, me, [s.jobs["y"]])
    assert personal(s) == ["b", "c"]


def test_a_job_that_is_held_goes_back_before_those_the_user_sent_later() -> None:
    s = story(1, slots=1)
    s.submit("busy", "BCG", user="root", run=9_000)
    for name in "bcd":
        s.submit(name, "BCG", run=900)
    s.cancel("b")
    s.cancel("c")  # d is promoted and waits; the personal queue is empty
    s.submit("e", "BCG", run=900, hold=True)
    s.do("hold", "d")
    assert personal(s) == ["d", "e"]
