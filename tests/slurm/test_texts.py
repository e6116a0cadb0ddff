"""Slurm's texts, sbatch calls and verdicts: all that needs no Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from dure.adapters.compute.local.rundir import Exit, Stamp
from dure.adapters.compute.slurm import nodes, parse, submit, verdict
from dure.adapters.compute.slurm.check import Cluster, advice, findings
from dure.adapters.compute.slurm.commands import Commands
from dure.adapters.compute.slurm.nodes import Mapped
from dure.adapters.compute.slurm.parse import Final, Gres
from dure.adapters.compute.slurm.site import Account, Launched, read_plainly
from dure.core.model import NodeHealth, Outcome
from dure.core.retry import judge
from dure.ports import Exited, LeaseExpired, LeaseKey, Returned
from tests.contract.backends import order

KEY = LeaseKey(job=7, epoch=2)
NODE = (
    "NodeName=n1 Arch=x86_64 CPUAlloc=0 CPUEfctv=16 CPUTot=16 CPULoad=1.09 "
    "AvailableFeatures=(null) Gres=gpu:rtx4090:2(S:0-1),gpu:a100:1 GresDrain=N/A "
    "GresUsed=gpu:rtx4090:1(IDX:0),gpu:a100:0(IDX:N/A) NodeAddr=127.0.0.1 "
    "OS=Linux 6.1 #1 SMP RealMemory=64000 AllocMem=0 State=IDLE{state} ThreadsPerCore=1 "
    "Partitions=rtx,backfill MemSpecLimit=1000 BootTime=1 ExtSensorsTemp=n/s {reason}"
)
JOB = (
    "JobId={id} JobName=dure-1-1 UserId=root(0) JobState={state} Reason=None Requeue=0 "
    "ExitCode={code} {derived}RunTime=00:00:01 StartTime=1796068692 EndTime=1796068693 "
    "ReqNodeList=here NodeList=here Command=(null) Comment=dure/x/1.1"
)


def line(state: str = "", reason: str = "") -> parse.NodeLine:
    (found,) = parse.node_lines(NODE.format(state=state, reason=reason))
    return found


def test_a_node():
    found = line()
    assert (found.name, found.states, found.responding) == ("n1", ("IDLE",), True)
    assert found.gres == (Gres(type="rtx4090", count=2), Gres(type="a100", count=1))
    assert sum(part.count for part in found.used) == 1
    assert (found.cores, found.memory_mib) == (16, 63000)
    assert found.partitions == ("rtx", "backfill")


@pytest.mark.parametrize(
    ("state", "reason", "health", "ready", "told"),
    [
        ("", "", NodeHealth.STABLE, True, ""),
        ("+DRAIN", "Reason=new fans [root@1796]", NodeHealth.OFFLINE, True, "DRAIN, new fans"),
        ("+DRAIN*", "Reason=a=b c [x@1]", NodeHealth.OFFLINE, True, "DRAIN+NOT_RESPONDING, a=b c"),
        ("+PLANNED", "", NodeHealth.STABLE, False, "PLANNED"),
        ("+MAINT", "", NodeHealth.OFFLINE, True, "MAINT"),
        ("*", "", NodeHealth.SUSPECTED, True, "NOT_RESPONDING"),
        ("+COMPLETING", "", NodeHealth.STABLE, True, ""),
    ],
)
def test_states_of_a_node(state, reason, health, ready, told):
    made = nodes.node(line(state, reason), Mapped())
    assert (made.health, made.ready) == (health, ready)
    assert made.drain_reason == (f"Slurm: {told}" if told else "")


@pytest.mark.parametrize(
    ("own", "leased", "yielding", "foreign"),
    [(0, (), 0, [2]), (1, (2,), 0, []), (0, (), 1, []), (0, (2,), 0, [1]), (5, (), 0, [])],
)
def test_foreign_use_avoids_what_dure_holds(own, leased, yielding, foreign):
    made = nodes.node(line(), Mapped(), own=own, leased=frozenset(leased), preemptible=yielding)
    assert [gpu.index for gpu in made.gpus if gpu.foreign] == foreign


def test_tiers_and_partitions_by_setting():
    mapped = Mapped(tiers={"rtx4090": "RTX4090"}, partitions={"a100": "big"}, preemptible=("rtx",))
    made = nodes.node(line(), mapped)
    assert [gpu.tier for gpu in made.gpus] == ["RTX4090", "RTX4090", "a100"]
    # `big` does not hold this node, and `rtx` is for jobs that yield.
    assert {t: s.partition for t, s in nodes.slots(line(), mapped).items()} == {
        "RTX4090": "backfill"
    }
    untyped = Mapped(tiers={"backfill": "V100"})
    assert untyped.tier("", ("rtx", "backfill")) == "V100"


def test_only_named_nodes_are_used():
    assert nodes.usable(line(), Mapped(nodes=("n1",)))
    assert not nodes.usable(line(), Mapped(nodes=("n2",)))


def test_ends_of_jobs():
    text = "\n".join(
        [
            JOB.format(id=1, state="FAILED", code="3:0", derived=""),
            JOB.format(id=2, state="OUT_OF_MEMORY", code="0:125", derived=""),
            JOB.format(id=3, state="RUNNING", code="0:0", derived=""),
            JOB.format(id=4, state="FAILED", code="1:0", derived="DerivedExitCode=0:125 "),
            "scontrol: show job 5",
        ]
    )
    found = parse.finals(text)
    assert set(found) == {1, 2, 4}
    assert (found[1].exit_code, found[1].signal, found[1].start_ms) == (3, None, 1796068692000)
    assert (found[2].signal, found[2].out_of_memory) == (9, True)
    assert found[4].out_of_memory


def test_ends_by_accounting():
    text = "1|CANCELLED by 1000|0:15|0:0|1796068692|1\n2|RUNNING|0:0|0:0|1|Unknown\n2.batch|x|||1|2"
    assert parse.sacct_finals(text) == {
        1: Final(state="CANCELLED", signal=15, start_ms=1796068692000)
    }


def test_job_lines_keep_what_stands_last():
    (found,) = parse.job_lines("12|PENDING|N/A|ReqNodeNotAvail, x|dure/a/1.2|odd\nnonsense|x\n")
    assert (found.id, found.state, found.start_ms) == (12, "PENDING", None)
    assert found.comment == "dure/a/1.2|odd"


@pytest.mark.parametrize(
    ("text", "limit"),
    [("UNLIMITED", None), ("7-00:00:00", 10080), ("01:30:00", 90), ("30", 30), ("30:15", 30)],
)
def test_partition_times(text, limit):
    assert parse.minutes(text) == limit


def launched(**fields: object) -> Launched:
    values = {
        "order": order("true", 7, epoch=2, gpus=(0, 3), cores=6, memory_mib=9000),
        "partition": "rtx",
        "gres_type": "rtx4090",
        "account": Account(uid=1000, gid=100),
        "time_limit_min": 12,
        **fields,
    }
    return Launched(**values)


def test_sbatch_pins_and_never_requeues():
    words = submit.argv(launched(), Path("/s/7/2"), "dure/x/7.2", submit.Options(account="lab"))
    assert {
        "--nodelist=here",
        "--partition=rtx",
        "--gres=gpu:rtx4090:2",
        "--cpus-per-task=6",
        "--mem=9000M",
        "--time=12",
        "--no-requeue",
        "--uid=1000",
        "--gid=100",
        "--account=lab",
        "--comment=dure/x/7.2",
        "--job-name=dure-7-2",
    } <= set(words)
    plain = submit.argv(
        launched(gres_type="", time_limit_min=None),
        Path("/s"),
        "c",
        submit.Options(as_user=False),
    )
    assert "--gres=gpu:2" in plain
    assert not [word for word in plain if word.startswith(("--uid", "--gid", "--time"))]


def test_slurms_limit_lies_behind_dures():
    assert submit.time_limit_min(None, 30) is None
    assert submit.time_limit_min(3600, 30) == 61 + submit.SPARE_MIN


def test_script_quotes_folders():
    text = submit.script(Path("/s/a b"), Path("/c/batch.py"), submit.Options())
    assert "'/s/a b'" in text
    assert text.startswith("#!/bin/sh\ntrap '' USR1\n")


@pytest.mark.parametrize(
    ("out", "number"), [("12\n", 12), ("12;c1\n", 12), ("", 0), ("sbatch: 12", 0)]
)
def test_answers_of_sbatch(out, number):
    assert submit.job_id(out) == number


# -- verdicts ------------------------------------------------------------------------


def ended(exit_code: int | None = 0, signal: int | None = None) -> Exit:
    return Exit(exit_code=exit_code, signal=signal, ended=Stamp(wall_ms=1, boot_ms=1), boot_id="b")


def told(end: Exit, state: str, *, termed: bool = False, stopped: bool = False, oom: bool = False):
    final = Final(state=state, out_of_memory=oom)
    return verdict.with_end(KEY, 5, end, final, termed=termed, stopped=stopped)


def test_failures_and_ends_after_a_signal_wait_for_slurms_word():
    assert not verdict.needs_word(ended(0), termed=False, stopped=False)
    assert verdict.needs_word(ended(1), termed=False, stopped=False)
    assert verdict.needs_word(ended(None, 9), termed=False, stopped=False)
    assert verdict.needs_word(ended(0), termed=True, stopped=False)
    assert not verdict.needs_word(ended(None, 15), termed=True, stopped=True)


def test_preempted_is_given_back_unless_dure_stopped_it():
    assert isinstance(told(ended(0), "PREEMPTED", termed=True), Returned)
    assert isinstance(told(ended(0), "PREEMPTED", termed=True, stopped=True), Exited)


def test_out_of_memory_only_of_a_failure():
    assert judge(told(ended(None, 9), "FAILED", oom=True).evidence, cancelled=False) is (
        Outcome.HOST_OOM
    )
    done = told(ended(0), "OUT_OF_MEMORY", oom=True)
    assert judge(done.evidence, cancelled=False) is Outcome.COMPLETED


def test_timeout_of_slurm_is_timed_out():
    seen = told(ended(0), "TIMEOUT", termed=True)
    assert judge(seen.evidence, cancelled=False) is Outcome.TIMED_OUT
    (late,) = verdict.without_end(KEY, 5, Final(state="TIMEOUT"), started=True, stopped=False)
    assert judge(late.evidence, cancelled=False) is Outcome.TIMED_OUT


@pytest.mark.parametrize(("exit_code", "termed", "lost"), [(0, False, False), (0, True, True)])
def test_node_that_fails_while_the_job_ends(exit_code, termed, lost):
    seen = told(ended(exit_code), "NODE_FAIL", termed=termed)
    assert isinstance(seen, LeaseExpired) is lost


@pytest.mark.parametrize(
    ("state", "started", "stopped", "kind", "detail"),
    [
        ("NODE_FAIL", True, False, LeaseExpired, NodeHealth.OFFLINE),
        ("PREEMPTED", True, False, Returned, None),
        ("UNKNOWN", True, False, LeaseExpired, NodeHealth.STABLE),
        ("FAILED", False, False, LeaseExpired, NodeHealth.STABLE),
        ("CANCELLED", False, False, LeaseExpired, NodeHealth.STABLE),
        ("CANCELLED", False, True, Exited, None),
        ("CANCELLED", True, False, Exited, None),
        ("COMPLETED", True, False, Exited, None),
    ],
)
def test_without_an_end_in_the_run_directory(state, started, stopped, kind, detail):
    final = Final(state=state, exit_code=0)
    (seen,) = verdict.without_end(KEY, 5, final, started=started, stopped=stopped)
    assert type(seen) is kind
    assert getattr(seen, "node_state", None) == detail
    if state == "CANCELLED" and started:
        assert judge(seen.evidence, cancelled=False) is Outcome.ERROR


# -- commands and files --------------------------------------------------------------


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_command_that_hangs_is_slurm_away(tmp_path):
    program(tmp_path, "squeue", "exec sleep 60")
    answer = Commands(bin_dir=str(tmp_path), timeout_s=0.2).run(["squeue"])
    assert (answer.ok, answer.away) == (False, True)


def test_words_of_a_controller_that_is_away(tmp_path):
    program(tmp_path, "sbatch", "echo 'Unable to contact slurm controller' >&2; exit 1")
    program(tmp_path, "scancel", "echo 'Access/permission denied' >&2; exit 1")
    run = Commands(bin_dir=str(tmp_path)).run
    assert run(["sbatch"]).away
    denied = run(["scancel"])
    assert (denied.ok, denied.away, denied.problem) == (False, False, "Access/permission denied")
    assert run(["sinfo"]).away  # not installed: nothing has arrived anywhere


def test_commands_see_none_of_the_servers_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("DURE_TOKEN", "hunter2")
    program(tmp_path, "squeue", "env")
    out = Commands(bin_dir=str(tmp_path)).run(["squeue"]).out
    assert "hunter2" not in out
    assert "SLURM_TIME_FORMAT=%s" in out


def test_files_of_a_job_are_read_plainly(tmp_path):
    import os

    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    assert read_plainly(tmp_path / "real") == b"x"
    assert read_plainly(tmp_path / "link") is None
    assert read_plainly(tmp_path / "pipe") is None


# -- check and advice ----------------------------------------------------------------


def test_check_names_what_must_change(tmp_path):
    text = "PartitionName=rtx PriorityTier=1 PreemptMode=REQUEUE State=UP MaxTime=UNLIMITED"
    cluster = Cluster(
        version="slurm",
        config={"SelectType": "select/linear", "MinJobAge": "5 sec"},
        nodes=(line(),),
        partitions=tuple(parse.partitions(text)),
    )
    found = findings(
        cluster,
        Mapped(preemptible=("gone",)),
        run_root=str(tmp_path),
        python="/no/python",
        as_user=True,
        is_root=False,
    )
    told_names = {(f.name, f.status) for f in found}
    assert {
        ("permission", "fail"),
        ("run_root", "fail"),
        ("python", "warn"),
        ("select", "fail"),
        ("min_job_age", "warn"),
        ("partition", "fail"),
        ("partition", "warn"),
        ("gpus", "ok"),
    } <= told_names


def test_check_of_a_slurm_that_is_away():
    found = findings(
        Cluster(problem="Unable to contact"),
        Mapped(),
        run_root="",
        python="python3",
        as_user=False,
        is_root=False,
    )
    assert (found[0].name, found[0].status) == ("slurm", "fail")


def test_advice_has_a_partition_for_each_tier():
    text = advice(Cluster(nodes=(line(),)), Mapped(partitions={"a100": "big"}))
    assert "PartitionName=dure-rtx4090 Nodes=n1 PriorityTier=10 PreemptMode=OFF" in text
    assert "PartitionName=big Nodes=n1" in text
    assert "PartitionName=backfill Nodes=n1 PriorityTier=1 PreemptMode=REQUEUE" in text
    assert advice(Cluster(), Mapped()).startswith("# No node has GPUs")
