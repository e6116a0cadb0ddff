"""What the backend asks of Slurm, and what it makes of bad answers: with scripted ones."""

from __future__ import annotations

import pytest

from dure.adapters.compute.slurm import nodes, submit
from dure.adapters.compute.slurm.commands import Answer
from dure.adapters.compute.slurm.leases import Durations
from dure.adapters.compute.slurm.parse import Final
from dure.adapters.compute.slurm.site import Site
from dure.adapters.compute.slurm.talk import BATCH, Talk
from dure.ports import LeaseKey

AWAY = Answer(ok=False, problem="Unable to contact slurm controller", away=True)
UNKNOWN = Answer(ok=False, problem="slurm_load_jobs error: Invalid job id specified")


class Script:
    """Answers by program; counts what was asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []

    def run(self, argv, text: str = "") -> Answer:
        self.asked.append(list(argv))
        key = "show" if argv[0] == "scontrol" and text else argv[0]
        return self.answers.get(key, Answer(ok=True))


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "runs", tmp_path / "state")


def talk(site: Site, script: Script, **durations: float) -> Talk:
    return Talk(script, site, submit.Options(), nodes.Mapped(), Durations(**durations))


def test_one_question_for_all_jobs(site):
    lines = "\n".join(f"{n}|RUNNING|1796068692|None|x" for n in range(1, 501))
    script = Script(squeue=Answer(ok=True, out=lines))
    word = talk(site, script).ask(range(1, 501))
    assert len(word.jobs) == 500
    assert [argv[0] for argv in script.asked] == ["squeue", "scontrol"]


def test_no_answer_is_not_an_empty_answer(site):
    word = talk(site, Script(squeue=AWAY)).ask([1, 2])
    assert word.jobs is None
    assert word.problem.startswith("Unable to contact")
    assert talk(site, Script(squeue=UNKNOWN)).ask([1]).jobs == {}


def test_forgotten_jobs_are_asked_of_accounting(site):
    script = Script(squeue=UNKNOWN, sacct=Answer(ok=True, out="7|TIMEOUT|0:9|0:0|1796068692|1\n"))
    word = talk(site, script).ask([7])
    assert word.finals == {7: Final(state="TIMEOUT", signal=9, start_ms=1796068692000)}


def test_without_accounting_it_is_asked_once(site):
    off = Answer(ok=False, problem="Slurm accounting storage is disabled")
    script = Script(squeue=UNKNOWN, sacct=off)
    one = talk(site, script)
    one.ask([7])
    one.ask([7])
    assert [argv[0] for argv in script.asked].count("sacct") == 1


def test_ended_jobs_are_asked_how_in_one_process(site):
    squeue = Answer(ok=True, out="1|FAILED|1|x|c\n2|COMPLETED|1|x|c\n3|RUNNING|1|x|c\n")
    shown = "JobId=1 JobState=FAILED ExitCode=3:0 StartTime=5\n"
    script = Script(squeue=squeue, show=Answer(ok=True, out=shown))
    word = talk(site, script).ask([1, 2, 3])
    assert set(word.finals) == {1}  # what was not told is asked again by the next sweep
    assert sum(argv == ["scontrol", "-o"] for argv in script.asked) == 1


def test_pauses_grow_while_slurm_is_away_and_end_with_an_answer(site):
    script = Script(squeue=AWAY)
    one = talk(site, script, pause_s=1, pause_max_s=3)
    seen = []
    for _ in range(4):
        one.ask([1])
        seen.append(one._pause_s)
    assert seen == [1, 2, 3, 3]
    assert one.paused
    assert one.room == 1
    script.answers = {}
    one.ask([1])
    assert not one.paused


def test_slow_answers_halve_what_is_sent_at_once(site):
    script = Script(squeue=Answer(ok=True, took_s=9))
    one = talk(site, script)
    rooms = []
    for _ in range(3):
        one._jobs([1])
        rooms.append(one.room)
    assert rooms[0] < BATCH
    assert rooms == sorted(rooms, reverse=True)
    script.answers = {}
    for _ in range(9):
        one._jobs([1])
    assert one.room == BATCH


def test_lost_launches_are_found_by_comment(site):
    key, other = LeaseKey(job=7, epoch=2), LeaseKey(job=8, epoch=1)
    text = "\n".join(
        [
            f"31|RUNNING|1|x|{site.comment(key)}",
            f"30|COMPLETED|1|x|{site.comment(key)}",
            "32|RUNNING|1|x|dure/another-installation/8.1",
            "33|RUNNING|1|x|(null)",
        ]
    )
    found = talk(site, Script(squeue=Answer(ok=True, out=text))).find([key, other])
    assert found == {key: 30}
    assert talk(site, Script(squeue=AWAY)).find([key]) is None
