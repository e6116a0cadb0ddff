"""What a waiting person is told: when, what would help, what moved the job; slots that lend."""

from __future__ import annotations

import msgspec

from dure.core.model import NodeHealth, Phase, Role, User
from dure.core.policy import Policy
from dure.engine import borrowing, preview, sooner, waiting
from dure.engine.forecast import PERIOD_MS, calibrated, look_ahead
from tests.core.build import R3080TI, R4090, node, request
from tests.story import HOUR, Story


def why(s: Story, name: str, lang: str = "en"):
    return waiting.why(s.engine, s.user("root"), lang, s.jobs[name])


def minutes(s: Story, at_ms: int | None) -> float | None:
    return None if at_ms is None else round((at_ms - s.clock.now_ms()) / 60_000, 1)


def busy(**policy: object) -> Story:
    """Two GPUs; three past runs of each lab: BCG's take 10 minutes, KDG's 30."""
    s = Story(
        [node("n1", (R4090, 2))],
        labs={"BCG": 0.0, "KDG": 0.0},
        policy=Policy(slots_per_user=100, **policy),
    )
    for i in range(3):
        s.submit(f"b{i}", "BCG", run=600)
        s.submit(f"k{i}", "KDG", run=1800)
    s.wait(3 * HOUR)
    return s


def test_a_forecast_follows_past_runs_and_names_the_job_it_waits_for() -> None:
    s = busy()
    s.submit("x", "BCG", run=600)
    s.submit("y", "KDG", run=1800)
    s.wait(60)
    s.submit("z", "BCG", run=600)
    told = why(s, "z")
    assert [minutes(s, t) for t in (told.eta.p20_ms, told.eta.p50_ms)] == [9.0, 9.0]
    assert told.eta.after == s.jobs["x"]
    assert told.eta.text == "in about 9m (9m to 9m), when job 7 ends"
    assert why(s, "z", "ko").eta.text == "약 9분 뒤(9분~9분), 작업 7이(가) 끝나면"
    free = next(p for p in told.placements if p.node == "n1")
    assert minutes(s, free.free_at_ms) == 9.0


def test_without_past_runs_or_limits_no_number_is_made_up() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("x", "BCG", run=600)
    s.submit("y", "BCG", run=600)
    told = why(s, "y")
    assert told.eta is None
    assert told.placements[0].free_at_ms is None


def test_time_limits_alone_give_a_number() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("x", "BCG", run=600, time_limit_s=1200)
    s.submit("y", "BCG", run=600)
    assert minutes(s, why(s, "y").eta.p50_ms) == 20.0


def test_forecasts_are_stored_once_and_scored_when_the_job_starts() -> None:
    s = busy()
    s.submit("x", "BCG", run=600)
    s.submit("y", "KDG", run=1800)
    s.submit("z", "BCG", run=600)
    look_ahead(s.engine)
    with s.store.read() as tx:
        (first,) = tx.open_forecasts()
    assert first.job == s.jobs["z"]
    s.wait(PERIOD_MS / 1000 + 1)
    look_ahead(s.engine)
    with s.store.read() as tx:
        assert tx.open_forecasts() == [first]
    s.wait(HOUR)
    look_ahead(s.engine)
    with s.store.read() as tx:
        assert tx.open_forecasts() == []
    score = calibrated(s.engine)
    assert (score.scored, score.inside) == (1, 1)


def test_a_job_that_leaves_the_queue_unstarted_is_not_scored() -> None:
    s = busy()
    for name in ("x", "y", "z"):
        s.submit(name, "BCG", run=600)
    look_ahead(s.engine)
    s.cancel("z")
    s.wait(HOUR)
    look_ahead(s.engine)
    with s.store.read() as tx:
        assert tx.open_forecasts() == []
    assert calibrated(s.engine).scored == 0


def test_looking_ahead_changes_nothing() -> None:
    s = busy()
    for name in ("x", "y", "z"):
        s.submit(name, "BCG", 2, run=600)
    before = s.order()
    look_ahead(s.engine)
    why(s, "z")
    assert s.order() == before
    s.check()


def test_a_preview_says_when_it_would_start() -> None:
    s = busy()
    for name in ("x", "y"):
        s.submit(name, "BCG", run=600)
    asked = request(lab="BCG", num_gpus=1)
    told = preview.preview(s.engine, s.user("bcg"), asked, "en")
    assert not told.starts_now
    assert minutes(s, told.eta.p50_ms) == 10.0
    assert len(s.order()) == 0


# -- what would help -----------------------------------------------------------------


def test_fewer_gpus_that_start_now_are_named() -> None:
    s = Story([node("n1", (R4090, 2)), node("n2", (R3080TI, 2))])
    s.submit("one", "BCG", tiers=("RTX4090",))
    s.submit("pair", "BCG", 2, tiers=("RTX4090",))
    told = why(s, "pair")
    found = {(h.change, h.value, h.node) for h in told.sooner}
    # It holds the free GPU already; with one GPU, or on any model, it starts.
    assert found == {("num_gpus", 1, "n1"), ("tiers", "", "n2")}
    assert any("With 1 instead of 2 GPUs" in h.text for h in told.sooner)
    assert all("바로 시작" in h.text for h in why(s, "pair", "ko").sooner)


def test_a_hint_comes_true() -> None:
    s = Story([node("n1", (R4090, 2)), node("n2", (R3080TI, 2))])
    s.submit("one", "BCG", tiers=("RTX4090",))
    s.submit("pair", "BCG", 2, tiers=("RTX4090",))
    assert s.state("pair") == "GLOBAL_QUEUE_WAIT"
    s.edit("pair", tiers=())
    assert s.state("pair") == "RUNNING"


def test_a_node_pin_and_a_large_memory_are_named() -> None:
    s = Story([node("n1", (R4090, 1)), node("n2", (R4090, 1)), node("n3", (R3080TI, 1))])
    s.submit("fill", "BCG", node="n1")
    s.submit("pin", "BCG", node="n1")
    assert [h.change for h in why(s, "pin").sooner] == ["node"]
    s.submit("fill2", "BCG", node="n2")
    s.submit("large", "BCG", min_vram_gb=20)
    assert [(h.change, h.node) for h in why(s, "large").sooner] == [("min_vram_gb", "n3")]


def test_nothing_helps_in_a_full_pool() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("a", "BCG")
    s.submit("b", "BCG")
    assert why(s, "b").sooner == []


def test_a_refusal_is_told_in_the_node_s_own_words() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("job", "BCG", run=s.run(refuse="workdir /x may not be shown"))
    reason = why(s, "job").reason
    assert reason.code == "LAUNCH_RETRY"
    assert "workdir /x may not be shown" in reason.text


# -- what moved it -------------------------------------------------------------------


def test_the_charge_that_moved_a_job_is_named() -> None:
    s = Story([node("n1", (R4090, 2))], labs={"BCG": 100_000.0, "KDG": 150_000.0, "OSL": 0.0})
    s.submit("long", "OSL", run=50 * HOUR)
    s.submit("short", "BCG", run=1200)
    s.submit("waits-b", "BCG")
    s.submit("waits-k", "KDG")
    assert s.order() == ["waits-b", "waits-k"]
    s.wait(1199)
    assert why(s, "waits-k").changes == []
    s.say("BCG's job ends: 1200 s x 82.6 puts it behind KDG, and KDG's job starts")
    s.wait(1)
    (moved,) = why(s, "waits-b").changes
    assert (moved.own, moved.lab, moved.job) == (True, "BCG", s.jobs["short"])
    assert float(moved.charged_tflop_s) == 1200 * 82.6
    assert "moved back" in moved.text


def test_a_lab_that_fell_behind_is_named_to_whoever_passed_it() -> None:
    s = Story([node("n1", (R4090, 2))], labs={"BCG": 100_000.0, "KDG": 150_000.0, "OSL": 0.0})
    s.submit("long", "OSL", run=50 * HOUR)
    s.submit("short", "BCG", run=1200)
    s.submit("waits-b", "BCG")
    s.submit("pair-k", "KDG", 2)
    s.wait(1200)
    (moved,) = why(s, "pair-k").changes
    assert (moved.own, moved.lab) == (False, "BCG")
    assert "now stands behind" in moved.text
    assert "뒤로 갔습니다" in why(s, "pair-k", "ko").changes[0].text


# -- slots that lend -----------------------------------------------------------------


def lending(**policy: object) -> Story:
    s = Story(
        [node("n1", (R4090, 2)), node("n2", (R4090, 2))],
        labs={"BCG": 0.0, "KDG": 0.0},
        policy=Policy(slots_per_user=1, **policy),
    )
    with s.store.write() as tx:
        tx.put_user(User(name="lee", lab="KDG", role=Role.MEMBER))
    return s


def test_a_limit_leaves_gpus_idle_unless_slots_lend() -> None:
    for borrow, running in ((False, 1), (True, 4)):
        s = lending(slots_borrow=borrow)
        for i in range(5):
            s.submit(f"j{i}", "BCG")
        assert sum(s.state(f"j{i}") == "RUNNING" for i in range(5)) == running
        s.check()


def test_a_slot_is_lent_only_for_a_start() -> None:
    """A pair that could not start at once stays where it is."""
    s = lending(slots_borrow=True)
    s.submit("a", "BCG", run=600)
    s.submit("b", "BCG", run=1200)
    s.submit("c", "BCG", run=3000)
    s.submit("pair", "BCG", 2)
    assert s.state("pair") == "PERSONAL_QUEUE_WAIT"
    assert s.reason("pair") == "PERSONAL_LIMIT"
    s.wait(1200)
    assert s.state("pair") == "RUNNING"


def test_the_next_job_of_the_least_lab_is_lent_first_and_debts_are_kept() -> None:
    s = lending(slots_borrow=True)
    s.submit("k0", "KDG", 2, run=600)
    s.submit("b0", "BCG", 2, run=600)
    s.submit("b1", "BCG", 2, run=600)
    s.submit("k1", "KDG", 2, run=600)
    s.submit("b2", "BCG", 2, run=600)
    s.wait(600)
    # Each has its own slot; nothing is idle, so nobody borrows.
    assert [s.state(n) for n in ("b1", "k1", "b2")] == ["RUNNING", "RUNNING", "PERSONAL_QUEUE_WAIT"]
    s.check()


def test_nothing_is_lent_in_maintenance() -> None:
    s = lending(slots_borrow=True)
    s.submit("a", "BCG", 2)
    s.submit("b", "BCG", 2, hold=True)
    s.phase(Phase.DRAINING)
    s.settle()
    assert s.state("b") == "PERSONAL_QUEUE_WAIT"


# -- questions change nothing, whatever happens meanwhile -----------------------------


def between(monkeypatch, module, name: str, act) -> None:
    """Call `act` once, right before the module's `name` runs."""
    real, done = getattr(module, name), []

    def first(*args: object, **kw: object) -> object:
        if not done:
            done.append(True)
            act()
        return real(*args, **kw)

    monkeypatch.setattr(module, name, first)


def test_a_job_that_is_cancelled_while_hints_are_looked_for_stays_away(monkeypatch) -> None:
    """It came back into the index, reserved, and no later job was started any more."""
    s = Story([node("n1", (R4090, 2)), node("n2", (R3080TI, 2))])
    s.submit("one", "BCG", tiers=("RTX4090",))
    s.submit("pair", "BCG", 2, tiers=("RTX4090",))
    job = s.job("pair")
    between(monkeypatch, sooner, "_starts_at", lambda: s.cancel("pair"))
    assert sooner.hints(s.engine, job) == []
    assert job.id not in s.engine.world.index
    s.check()


def test_a_job_that_is_promoted_while_slots_are_lent_stays_in_the_line(monkeypatch) -> None:
    s = lending(slots_borrow=True)
    s.submit("a", "BCG", 2, run=600)
    s.submit("b", "BCG", 2, run=600)
    s.submit("c", "BCG", 2, run=600)
    assert s.state("c") == "PERSONAL_QUEUE_WAIT"
    waiting = s.job("c")

    def end_of_a() -> None:
        s.cancel("a")

    between(monkeypatch, borrowing, "_would_start", end_of_a)
    s.engine.policy = msgspec.structs.replace(s.engine.policy, slots_borrow=True)
    borrowing._first_that_starts(s.engine, [waiting])
    s.check()


def test_nothing_more_is_lent_to_whoever_waits_on_a_loan() -> None:
    """Every launch is refused: the others' jobs stay in the personal queue."""
    s = lending(slots_borrow=True)
    for i in range(12):
        s.submit(f"j{i}", "BCG", run=s.run(refuse="no room"))
    promoted = sum(s.state(f"j{i}") != "PERSONAL_QUEUE_WAIT" for i in range(12))
    assert promoted <= 5


def test_in_maintenance_nobody_is_told_a_time() -> None:
    s = busy()
    for name in ("x", "y", "z"):
        s.submit(name, "BCG", run=600)
    s.phase(Phase.DRAINING)
    assert why(s, "z").eta is None


def test_members_are_not_told_what_another_lab_was_charged() -> None:
    s = Story([node("n1", (R4090, 2))], labs={"BCG": 100_000.0, "KDG": 150_000.0, "OSL": 0.0})
    s.submit("long", "OSL", run=50 * HOUR)
    s.submit("short", "BCG", run=1200)
    s.submit("waits-b", "BCG")
    s.submit("pair-k", "KDG", 2)
    s.wait(1200)
    (member,) = waiting.why(s.engine, s.user("kdg"), "en", s.jobs["pair-k"]).changes
    assert (member.job, member.charged_tflop_s) == (None, None)
    (admin,) = why(s, "pair-k").changes
    assert float(admin.charged_tflop_s) == 1200 * 82.6


def test_a_forecast_is_the_first_of_an_entry_even_after_it_came_true() -> None:
    s = busy()
    for name in ("x", "y", "z"):
        s.submit(name, "BCG", run=3000)
    look_ahead(s.engine)
    s.wait(3100)
    look_ahead(s.engine)
    with s.store.read() as tx:
        (scored,) = tx.forecasts(since_ms=0)
    assert scored.started_ms
    s.node("n1", health=NodeHealth.OFFLINE)
    s.submit("again", "BCG", run=600)
    s.node("n1", health=NodeHealth.STABLE)
    s.wait(60)
    look_ahead(s.engine)
    with s.store.read() as tx:
        assert scored in tx.forecasts(since_ms=0)


def test_the_end_of_a_penalty_is_waited_for() -> None:
    s = busy()
    s.node("n1", penalty_until_ms=s.clock.now_ms() + 600_000)
    s.submit("z", "BCG", run=600)
    assert minutes(s, why(s, "z").eta.p50_ms) == 10.0
