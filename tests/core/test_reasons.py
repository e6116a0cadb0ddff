"""Why a job waits: every reason code in a scenario, and its sentence in both languages."""

from __future__ import annotations

import msgspec
import pytest

from dure.core.errors import DureError, ErrorCode
from dure.core.messages import LANGUAGES, REASONS, say
from dure.core.model import Evidence, Gpu, Lab, Limits, NodeHealth, Phase, Retry, RetryOn
from dure.core.plan import ReasonCode as R
from dure.engine import admin
from tests.core.build import R3080TI, R4090, node
from tests.story import CUDA_OOM, Story

FULL = [node("n1", (R4090, 2))]


def full(**kw: object) -> Story:
    """n1's two GPUs are busy."""
    s = Story(FULL, labs={"BCG": 0, "KDG": 5}, **kw)
    s.submit("a", "BCG", run=9_000)
    s.submit("b", "BCG", run=9_000)
    return s


def personal_limit() -> Story:
    s = Story(FULL, slots=1)
    s.submit("a", "BCG", run=9_000)
    s.submit("job", "BCG")
    return s


def rank_behind() -> Story:
    s = full()
    s.submit("first", "BCG")
    s.submit("job", "KDG")
    return s


def same_lab_behind() -> Story:
    s = full()
    s.submit("first", "BCG")
    s.submit("job", "BCG")
    return s


def no_free_gpu() -> Story:
    s = full()
    s.submit("job", "BCG")
    return s


def needs_one_node() -> Story:
    """One GPU is idle on each of two nodes; the job of rank 2 needs both in one."""
    s = Story(
        [node("n1", (R4090, 2)), node("n2", (R4090, 2)), node("n3", (R3080TI, 2))],
        labs={"BCG": 0, "KDG": 5},
    )
    for i, where in enumerate(("n1", "n2", "n3")):
        s.submit(f"busy{i}", "BCG", run=9_000, node=where)
    s.submit("head", "BCG", 2, tiers=("RTX3080Ti",))
    s.submit("job", "KDG", 2, tiers=("RTX4090",))
    return s


def reserving() -> Story:
    s = Story(FULL)
    s.submit("a", "BCG", run=9_000)
    s.submit("job", "BCG", 2)
    return s


def reservation_lost() -> Story:
    s = reserving()
    s.node(
        "n1",
        ready=False,
        gpus=(Gpu(index=0, tier="RTX4090"), Gpu(index=1, tier="RTX4090", foreign=True)),
    )
    return s


def next_cycle() -> Story:
    s = full()
    s.submit("job", "BCG")
    # A GPU was seen free a moment ago: no cycle has run since.
    s.engine.world.pool.release(s.jobs["a"], 1)
    return s


def oom_escalated() -> Story:
    s = Story([node("n1", (R4090, 1)), node("n2", (R3080TI, 1))])
    s.submit("a", "BCG", run=9_000)
    s.submit("job", "BCG", run=s.run(5, evidence=CUDA_OOM))
    s.wait(5)
    return s


def node_offline() -> Story:
    s = Story([node("n1", (R4090, 1), health=NodeHealth.OFFLINE)])
    s.submit("job", "BCG")
    s.wait(60)
    return s


def node_suspected() -> Story:
    s = Story([node("n1", (R4090, 1), health=NodeHealth.SUSPECTED)])
    s.submit("job", "BCG")
    return s


def node_drained() -> Story:
    s = Story([node("n1", (R4090, 1), drained=True)])
    s.submit("job", "BCG")
    return s


def node_penalty() -> Story:
    s = Story([node("n1", (R4090, 1), penalty_until_ms=2_000_000_000_000)])
    s.submit("job", "BCG")
    return s


def gpu_unavailable() -> Story:
    s = Story([node("n1", (R4090, 1))])
    s.node("n1", gpus=(Gpu(index=0, tier="RTX4090", healthy=False),))
    s.submit("job", "BCG")
    return s


def retry_backoff() -> Story:
    s = Story(FULL)
    s.submit(
        "job", "BCG", run=s.run(1, evidence=Evidence(exit_code=1)), retry=Retry(on=RetryOn.ERROR)
    )
    s.wait(1)
    return s


def launch_retry() -> Story:
    s = Story(FULL)
    s.submit("job", "BCG", run=s.run(1, refuse="no room"))
    return s


def not_before() -> Story:
    s = Story(FULL)
    s.submit("job", "BCG", not_before_ms=s.clock.now_ms() + 60_000)
    return s


def held() -> Story:
    s = Story(FULL)
    s.submit("job", "BCG", hold=True)
    return s


def lab_limit() -> Story:
    s = full()
    s.submit("job", "BCG", 2)
    admin.put_lab(s.engine, "root", "BCG", limits=Limits(num_gpus=1))
    s.settle()
    return s


def fit_lost() -> Story:
    s = full()
    s.submit("job", "BCG", 2)
    admin.put_tier(s.engine, "root", msgspec.structs.replace(R4090, max_gpus=1))
    s.settle()
    return s


def maintenance() -> Story:
    s = full()
    s.submit("job", "BCG")
    s.phase(Phase.DRAINING)
    return s


SCENARIOS = {
    R.PERSONAL_LIMIT: personal_limit,
    R.RANK_BEHIND: rank_behind,
    R.SAME_LAB_BEHIND: same_lab_behind,
    R.NO_FREE_GPU: no_free_gpu,
    R.NEEDS_ONE_NODE: needs_one_node,
    R.RESERVING: reserving,
    R.RESERVATION_LOST: reservation_lost,
    R.NEXT_CYCLE: next_cycle,
    R.OOM_ESCALATED: oom_escalated,
    R.NODE_WAIT: node_offline,
    R.NODE_OFFLINE: node_offline,
    R.NODE_SUSPECTED: node_suspected,
    R.NODE_DRAINED: node_drained,
    R.NODE_PENALTY: node_penalty,
    R.GPU_UNAVAILABLE: gpu_unavailable,
    R.RETRY_BACKOFF: retry_backoff,
    R.LAUNCH_RETRY: launch_retry,
    R.NOT_BEFORE: not_before,
    R.HELD: held,
    R.LAB_LIMIT: lab_limit,
    R.FIT_LOST: fit_lost,
    R.MAINTENANCE: maintenance,
}


def test_every_reason_has_a_scenario() -> None:
    assert set(SCENARIOS) == set(R)


@pytest.mark.parametrize("code", SCENARIOS, ids=lambda c: c.value)
def test_the_reason_is_told_with_a_sentence_in_both_languages(code: R) -> None:
    s = SCENARIOS[code]()
    told = s.why("job")
    found = {r.code: r for r in (told.reason, *told.more)}
    assert code in found, told
    # Pages turn times and lengths into words; all other numbers come with the reason.
    words = {"until": "noon", "waited": "1m", **found[code].params}
    for lang in LANGUAGES:
        sentence = say(REASONS[code], lang, words)
        assert sentence
        assert "–" not in sentence, f"{code}: a number of the sentence is missing"


@pytest.mark.parametrize(
    "code",
    [c for c in SCENARIOS if c not in (R.NODE_WAIT, R.OOM_ESCALATED, R.RESERVATION_LOST)],
    ids=lambda c: c.value,
)
def test_the_reason_comes_first(code: R) -> None:
    assert SCENARIOS[code]().reason("job") == code.value


def test_s26_a_job_whose_only_placement_is_off_or_drained_is_accepted_and_waits() -> None:
    for story, code in ((node_offline, "NODE_OFFLINE"), (node_drained, "NODE_DRAINED")):
        s = story()
        assert s.state("job") == "NODE_WAIT"
        assert s.reason("job") == code
        s.node("n1", health=NodeHealth.STABLE, drained=False)
        assert s.state("job") == "RUNNING"


def test_a_personal_job_of_an_absent_node_stays_in_its_queue_and_shows_the_reason() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (R3080TI, 1), drained=True)], slots=1)
    s.submit("a", "BCG", run=9_000)
    s.submit("job", "BCG", tiers=("RTX3080Ti",))
    assert s.state("job") == "PERSONAL_QUEUE_WAIT"
    assert s.reason("job") == "NODE_DRAINED"


def test_a_job_that_nothing_can_ever_fit_is_refused() -> None:
    s = Story(FULL)
    with pytest.raises(DureError) as caught:
        s.submit("job", "BCG", 4)
    assert caught.value.code is ErrorCode.NO_FIT_PLACEMENT
    assert caught.value.params["failed_constraint"] == "max_gpus"
    assert caught.value.params["nearest_node"] == "n1"
    assert [r["num_gpus"] for r in caught.value.params["nearest_requests"]] == [2]
    assert s.truth().jobs == ()


def test_the_explanation_names_each_placement_and_what_it_lacks() -> None:
    s = Story([node("n1", (R4090, 2)), node("n2", (R3080TI, 1))])
    s.submit("a", "BCG", 2, run=9_000, tiers=("RTX4090",))
    s.submit("job", "BCG", 2)
    notes = {n.node: (n.fits, n.lacks, n.idle) for n in s.why("job").placements}
    assert notes == {"n1": (True, "", 0), "n2": (False, "capacity", 1)}


def test_explain_shows_the_rank_that_is_used_and_the_labs_ahead() -> None:
    """S18, I10: the order shown is the order used."""
    s = rank_behind()
    told = s.why("job")
    assert (told.rank, told.ahead_labs) == (2, ("BCG",))
    assert s.order() == ["first", "job"]


def test_s21_every_waiting_job_has_a_reason_always() -> None:
    """Through promotion, backoff, absence, drain, maintenance: explain never is at a loss."""
    s = full(slots=3)
    s.submit("c", "BCG", run=50)
    for i in range(6):
        s.submit(f"w{i}", "BCG", 1 + i % 2, run=300, hold=i == 5)
    steps = [
        lambda: s.wait(100),
        lambda: s.node("n1", health=NodeHealth.SUSPECTED),
        lambda: s.node("n1", health=NodeHealth.OFFLINE),
        lambda: s.node("n1", drained=True),
        lambda: s.node("n1", health=NodeHealth.STABLE, drained=False),
        lambda: s.cancel("a"),
        lambda: s.phase(Phase.DRAINING),
        lambda: s.phase(Phase.NORMAL),
    ]
    for change in steps:
        change()
        for name in s.jobs:
            if s.state(name).endswith("_WAIT"):
                assert s.reason(name)
    s.check()


def test_a_lab_that_is_not_known_yet_is_explained_too() -> None:
    s = Story(FULL)
    with s.store.write() as tx:
        tx.put_lab(Lab(name="NEW"))
        tx.put_user(msgspec.structs.replace(s.user("bcg"), name="new", lab="NEW"))
    s.submit("a", "NEW", 2, run=9_000)
    s.submit("job", "NEW")
    assert s.reason("job") == "NO_FREE_GPU"
