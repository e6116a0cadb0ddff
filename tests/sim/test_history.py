"""An installation's own past as a load: read from a real store, replayed, changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dure.adapters.store.sql import SqlStore
from dure.core.policy import Policy
from dure.sim.comparison import Runs, cases, compare
from dure.sim.contenders import Contender
from dure.sim.history import Added, changed, parse_added, read_history
from dure.sim.refusals import SimulationRefused
from dure.wiring.simulate import simulate
from tests.core.build import R4090, node
from tests.story import HOUR, Story

DAY = 24 * HOUR


def lived(store: object = None) -> Story:
    """Two GPUs, five days: a queue on the first day, jobs across the third, one cancelled."""
    story = Story([node("g1", (R4090, 2))], [R4090], {"BCG": 0.0, "KDG": 0.0}, store=store, slots=2)
    for n in range(4):
        story.submit(f"old{n}", "BCG", run=10 * HOUR)
    story.wait(2 * DAY)
    story.submit("across", "KDG", run=2 * DAY)
    story.submit("early", "BCG", num_gpus=2, run=HOUR)
    story.wait(1.5 * DAY)
    story.submit("gone", "BCG", num_gpus=2, run=HOUR)
    story.cancel("gone")
    for n in range(3):
        story.submit(f"new{n}", "BCG", run=6 * HOUR)
    story.wait(1.5 * DAY)
    story.submit("last", "KDG", run=DAY)
    story.wait(HOUR)
    story.submit("waits", "KDG", num_gpus=2)
    return story


def read(story: Story, days: float):
    now_ms = story.clock.now_ms()
    with story.store.read() as tx:
        return read_history(tx, story.policy, now_ms - round(days * 86_400_000), now_ms, "here")


def by_name(story: Story, trace):
    ids = {number: name for name, number in story.jobs.items()}
    return {ids[j.id]: j for j in trace.jobs}


def test_the_whole_past_replays_as_it_was() -> None:
    story = lived()
    past = read(story, 30)
    jobs = by_name(story, past.trace)
    assert set(jobs) == {
        "old0", "old1", "old2", "old3", "across", "early", "new0", "new1", "new2", "last"
    }  # fmt: skip
    assert jobs["old0"].run_s == 10 * HOUR
    assert jobs["last"].run_s == HOUR
    notes = dict(past.notes)
    assert notes["open_end"] == {"count": 1}
    assert notes["never_ran"] == {"count": 2}
    assert "running_then" not in notes
    site = Contender("site", story.policy)
    (row,) = compare(cases([site], past.trace, past.cluster), Runs(engine=True), lambda _: None)
    assert row.violations == ()
    zero_ms = story.clock.now_ms() - 30 * 86_400_000
    for ran in row.first.ran:
        name = next(n for n, number in story.jobs.items() if number == ran.job.id)
        really_s = (story.attempt(name).dispatched_ms - zero_ms) / 1000
        # The replay decides on a grid of 5 s, the site at once.
        assert ran.start_s == pytest.approx(really_s, abs=60), name


def test_a_window_cuts_what_ran_already_and_knows_what_was_used_before() -> None:
    story = lived()
    past = read(story, 2)
    jobs = by_name(story, past.trace)
    assert set(jobs) == {"across", "early", "new0", "new1", "new2", "last"}
    # Until the window began 1.0417 of its 2 days had passed.
    assert jobs["across"].measured is False
    assert jobs["across"].submit_s == 0
    assert jobs["across"].run_s == pytest.approx(4 * DAY - 3 * DAY - HOUR)
    assert jobs["early"].submit_s == 0
    assert jobs["early"].measured is True
    assert dict(past.notes)["running_then"] == {"count": 1}
    labs = {lab.name: lab for lab in past.trace.labs}
    assert labs["BCG"].usage_micro > 40 * HOUR
    assert labs["BCG"].as_of_ms < 0
    assert labs["KDG"].usage_micro == 0
    assert past.trace.slots["bcg"] == 2


def test_nodes_may_be_added_and_taken_away() -> None:
    cluster = read(lived(), 30).cluster
    more, notes = changed(cluster, [Added("RTX4090", 8, 2)], ["g1"])
    assert (more.gpus, len(more.nodes)) == (16, 2)
    assert [key for key, _ in notes] == ["removed", "added"]
    with pytest.raises(SimulationRefused, match="no tier named X"):
        changed(cluster, [Added("X", 8, 2)], [])
    with pytest.raises(SimulationRefused, match="Known nodes: g1"):
        changed(cluster, [], ["g2"])
    assert parse_added("A100-80GB:8x2") == Added("A100-80GB", 8, 2)
    for text in ("A100", "A100:8", "A100:0x1", ":8x1", "A100:8xx1"):
        with pytest.raises(ValueError, match="TIER:GPUSxCOUNT"):
            parse_added(text)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    store = SqlStore(f"sqlite:///{tmp_path / 'dure.db'}")
    lived(store)
    store.close()
    return tmp_path


def test_the_command_reads_the_sites_store_and_changes_nothing(
    state_dir: Path, monkeypatch
) -> None:
    monkeypatch.setenv("DURE_POLICY__SLOTS_PER_USER", "2")
    before = (state_dir / "dure.db").read_bytes()
    asked = ["--from-history", "30d", "--state-dir", str(state_dir), "--policy", "balanced"]
    told = CliRunner().invoke(simulate, [*asked, "--json"])
    assert told.exit_code == 0, told.output
    assert list(json.loads(told.stdout)["policies"]) == ["site", "balanced"]
    more = CliRunner().invoke(simulate, [*asked, "--add-nodes", "RTX4090:2x1", "--json"])
    rows = json.loads(more.stdout)["policies"]
    assert list(rows) == ["today", "site", "balanced"]
    assert rows["today"] == rows["today"] | {
        k: v for k, v in json.loads(told.stdout)["policies"]["site"].items() if k != "seconds"
    }
    assert rows["site"]["mean_wait_h"] < rows["today"]["mean_wait_h"]
    assert "What people really waited" in CliRunner().invoke(simulate, asked).stderr
    fewer = CliRunner().invoke(simulate, [*asked, "--remove-node", "g1"])
    assert fewer.exit_code == 2
    assert "NOTHING_FITS" in fewer.stderr
    assert (state_dir / "dure.db").read_bytes() == before


def test_without_a_past_it_says_so_and_makes_no_database(tmp_path: Path) -> None:
    told = CliRunner().invoke(
        simulate, ["--from-history", "30d", "--state-dir", str(tmp_path)], env={"DURE_LANG": "ko"}
    )
    assert told.exit_code == 2
    assert "NO_HISTORY" in told.stderr
    assert "기간을 늘리거나" in told.stderr
    assert list(tmp_path.iterdir()) == []


def test_site_uses_its_own_policy_numbers(state_dir: Path, tmp_path: Path) -> None:
    """The settings file decides what `site` is; classic beside it differs."""
    config = tmp_path / "dure.toml"
    config.write_text('[policy]\nprofile = "balanced"\n')
    from dure.core.policy import BALANCED
    from dure.wiring.simulate import Asked, _cases

    asked = Asked(
        config=config, state_dir=str(state_dir), trace_file=None, cluster_file=None, made=None,
        history_s=86_400 * 30, added=(), removed=(), policies=("classic",), slots=None, jitter=0,
        seed=0, engine=False, as_json=False, csv_dir=None, report_file=None, language=None,
    )  # fmt: skip
    found, _ = _cases(asked)
    assert [(c.name, c.contender.policy) for c in found] == [
        ("site", BALANCED),
        ("classic", Policy()),
    ]
