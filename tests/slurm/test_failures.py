"""A real Slurm that fails in the ways it does fail, and people who use it beside Dure."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tools.slurm_testbed import PREEMPTIBLE, NodeSpec, pids, read

from dure.adapters.compute.slurm.commands import Answer
from dure.adapters.compute.slurm.nodes import Mapped
from dure.core.model import NodeHealth
from dure.core.oom import oom_kind
from dure.ports import LaunchStatus, LeaseExpired, LeaseKey, NodeChanged, StopKind, StopOrder
from tests.contract.backends import LOOP, order
from tests.slurm.conftest import made
from tests.slurm.rig import DURATIONS, SlurmRig

KEY = LeaseKey(job=1, epoch=1)


@pytest.fixture
def rig(shared_bed):
    opened = SlurmRig(shared_bed)
    yield opened
    opened.close()


@pytest.fixture
def breakable(own_bed):
    opened = SlurmRig(own_bed)
    yield opened
    opened.close()


def node(rig: SlurmRig, name: str = "here"):
    return next(n for n in rig.backend.inventory().nodes if n.name == name)


def foreign(rig: SlurmRig) -> list[int]:
    return [gpu.index for gpu in node(rig).gpus if gpu.foreign]


def other_job(rig: SlurmRig, partition: str, gpus: int) -> str:
    """Somebody uses Slurm directly."""
    argv = ["sbatch", "--parsable", "-p", partition, "-w", "here", f"--gres=gpu:{gpus}"]
    return rig.bed.run(*argv, "-D", "/", "-o", "/dev/null", "--wrap", "sleep 600").strip()


# -- whose it is ---------------------------------------------------------------------


def test_job_runs_under_its_own_account(rig):
    rig.backend.launch([order("id -un; env; touch mine", 1, env={"MINE": "1"})])
    rig.until(1, "Freed")
    text = rig.log(1)
    assert text.splitlines()[0] == "nobody"
    assert {"JOB_ID=1", "DURE_JOB_EPOCH=1", "MINE=1", "USER=nobody"} <= set(text.splitlines())
    assert "secret" not in text
    assert "SLURM_CONF" not in text
    assert (rig.out(1) / "mine").owner() == "nobody"
    assert rig.run_dir(1).stat().st_mode & 0o777 == 0o700
    assert rig.run_dir(1).parent.owner() == "root"


def test_the_job_sees_the_gpus_that_slurm_chose(rig):
    script = f"echo $CUDA_VISIBLE_DEVICES > gpus; {LOOP}"
    orders = [order(script, job, gpus=(job,), simulated=False) for job in (1, 2)]
    rig.backend.launch(orders)
    for job in (1, 2):
        rig.ready(job)
    seen = [(rig.out(job) / "gpus").read_text().strip() for job in (1, 2)]
    assert sorted(seen) == ["0", "1"]


def test_unknown_account_is_refused_with_a_sentence(rig):
    (answer,) = rig.backend.launch([order("succeeds", 1, user="nobody-of-that-name")])
    assert answer.status is LaunchStatus.REFUSED
    assert "no account" in answer.reason


def test_a_link_in_place_of_the_log_is_not_followed(rig):
    rig.backend.launch([order("rm ../log; ln -s /etc/shadow ../log; true", 1)])
    rig.until(1, "Freed")
    assert rig.backend.log_path(KEY) is None


def test_a_job_that_only_claims_to_be_free_is_ended(rig):
    claim = (
        "cat > ../exit.json <<E\n"
        '{"exit_code": 0, "ended": {"wall_ms": 1, "boot_ms": 1}, "boot_id": "x",'
        ' "freed": {"wall_ms": 1, "boot_ms": 1}}\nE\n'
        'echo "{}" > ../slurm-end.json\n'
    )
    rig.backend.launch([order(claim + LOOP, 1)])
    rig.until(1, "Freed")
    number = rig.slurm_id(1)
    rig.acknowledge()
    rig.look()
    rig.wait(lambda: rig.bed.run("squeue", "-h", "-t", "all", "-j", str(number), "-o", "%T"))
    rig.wait(lambda: state(rig, number) in ("CANCELLED", "COMPLETING", "FAILED"))


def state(rig: SlurmRig, number: int) -> str:
    return rig.bed.run("squeue", "-h", "-t", "all", "-j", str(number), "-o", "%T").strip()


# -- other users of Slurm ------------------------------------------------------------


def test_gpus_used_through_slurm_directly_are_not_idle(rig):
    rig.backend.launch([order("runs", 1, gpus=(0,))])
    rig.ready(1)
    theirs = other_job(rig, "rtx4090", 2)
    rig.wait(lambda: foreign(rig) == [2, 3])
    rig.bed.run("scancel", theirs)
    rig.wait(lambda: foreign(rig) == [])


def test_gpus_of_preemptible_jobs_are_idle(rig):
    theirs = other_job(rig, PREEMPTIBLE, 3)
    rig.wait(lambda: state(rig, int(theirs)) == "RUNNING")
    time.sleep(2 * DURATIONS.query_s)
    assert foreign(rig) == []
    rig.backend.launch([order("succeeds", 1, gpus=(0, 1))])
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]
    rig.bed.run("scancel", theirs)


def test_cancelled_by_somebody_in_slurm(rig):
    rig.backend.launch([order("runs", 1)])
    rig.ready(1)
    rig.bed.run("scancel", str(rig.slurm_id(1)))
    evidence = rig.exited(1).evidence
    assert (evidence.signal, evidence.scheduler_state) == (15, "CANCELLED")
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]


def test_cancelled_in_slurm_is_no_success_even_if_it_saved(rig):
    rig.backend.launch([order("saves", 1)])
    rig.ready(1)
    rig.bed.run("scancel", str(rig.slurm_id(1)))
    evidence = rig.exited(1).evidence
    assert (evidence.exit_code, evidence.signal) == (None, 15)


def test_killed_by_somebody_with_its_supervisor(rig):
    rig.backend.launch([order("stubborn", 1)])
    rig.ready(1)
    rig.bed.run("scancel", "--signal=KILL", "--full", str(rig.slurm_id(1)))
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]
    evidence = rig.exited(1).evidence
    assert evidence.signal == 9 or evidence.exit_code
    assert evidence.scheduler_state in ("CANCELLED", "FAILED")


def test_a_launch_that_slurm_does_not_start_goes_back_in_line(shared_bed):
    patient = DURATIONS.__class__(query_s=0.3, poll_s=0.02, settle_s=1, pending_s=2)
    rig = SlurmRig(shared_bed, durations=patient)
    try:
        theirs = other_job(rig, "rtx4090", 4)
        rig.wait(lambda: state(rig, int(theirs)) == "RUNNING")
        rig.backend.launch([order("succeeds", 1)])
        assert rig.until(1, "Freed") == ["LeaseExpired", "Freed"]
        assert rig.of(1)[0].node_state is NodeHealth.STABLE
        assert rig.starts(1) == 0
        rig.bed.run("scancel", theirs)
    finally:
        rig.close()


def test_what_slurm_refuses_goes_back_in_line(rig):
    rig.backend.launch([order("succeeds", 1, gpus=(0, 1, 2, 3, 4, 5))])
    assert rig.until(1, "Freed") == ["LeaseExpired", "Freed"]
    assert rig.starts(1) == 0


def test_dures_time_limit_is_exact(rig):
    rig.backend.launch([order(f"trap 'exit 0' TERM; {LOOP}", 1, time_limit_s=1)])
    evidence = rig.exited(1).evidence
    assert (evidence.exit_code, evidence.timed_out) == (0, True)


# -- this server fails ---------------------------------------------------------------


def test_launch_whose_answer_was_lost_is_found_and_not_doubled(rig, monkeypatch):
    monkeypatch.setattr(rig.backend._watch, "_answered", lambda lease, answer: None)
    monkeypatch.setattr(rig.backend._watch._talk, "find", lambda keys: None)
    rig.backend.launch([order("echo once; sleep 1", 1)])
    rig.wait(rig.slurm_jobs)
    rig.restart()
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]
    assert rig.log(1) == "once\n"
    assert len(rig.slurm_jobs()) == 1


def test_stop_of_a_launch_whose_answer_was_lost(rig, monkeypatch):
    commands = rig.backend._watch._talk.commands
    real = commands.run
    sent = []

    def run(argv, text=""):
        if argv[0] == "sbatch":
            sent.append(argv)
            return Answer(ok=False, problem="no answer", away=True)
        return real(argv, text)

    monkeypatch.setattr(commands, "run", run)
    rig.backend.launch([order("succeeds", 1)])
    rig.wait(lambda: sent)
    rig.backend.stop([StopOrder(key=KEY, kind=StopKind.CANCEL, kill_after_s=5)])
    assert rig.until(1, "Freed") == ["Exited", "Freed"]
    count = len(sent)
    time.sleep(1)
    assert len(sent) == count
    assert rig.slurm_jobs() == []


def test_jobs_that_no_lease_stands_for_are_cancelled(rig):
    rig.backend.launch([order("runs", 1)])
    rig.ready(1)
    number = rig.slurm_id(1)
    rig.backend.close()
    rig.backend._site.book.collect(KEY)
    rig.open()
    rig.wait(lambda: state(rig, number) != "RUNNING")


# -- Slurm fails ---------------------------------------------------------------------


def test_controller_killed_and_started_again(breakable):
    rig = breakable
    rig.backend.launch([order("runs", 1), order("sleep 8", 2, gpus=(1,))])
    rig.ready(1)
    rig.until(2, "Started")
    began = time.time()
    # What a killed slurmctld has not saved (within 5 s) it forgets; that is another test.
    saved = rig.bed.folder / "state" / "job_state"
    rig.wait(lambda: saved.exists() and saved.stat().st_mtime > began)
    rig.bed.stop_controller()
    # The run directory tells the end although Slurm cannot.
    assert rig.until(2, "Freed") == ["Started", "Exited", "Freed"]
    rig.wait(lambda: rig.backend.inventory().unreachable)
    assert node(rig).health is NodeHealth.SUSPECTED
    (answer,) = rig.backend.launch([order("succeeds", 3, gpus=(1,))])
    assert answer.status is LaunchStatus.UNKNOWN
    assert rig.names(1) == ["Started"]
    rig.bed.start_controller()
    rig.wait(lambda: not rig.backend.inventory().unreachable)
    rig.wait(lambda: node(rig).health is NodeHealth.STABLE)
    assert rig.names(1) == ["Started"]
    rig.backend.stop([StopOrder(key=KEY, kind=StopKind.CANCEL, kill_after_s=5)])
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]


def test_controller_that_forgets_a_running_job(breakable):
    rig = breakable
    rig.backend.launch([order("runs", 1)])
    rig.ready(1)
    rig.bed.stop_controller()
    for path in (rig.bed.folder / "state").iterdir():
        if path.is_file():
            path.unlink()
    rig.bed.start_controller()
    assert rig.until(1, "Freed") == ["Started", "LeaseExpired", "Freed"]
    assert rig.of(1)[1].node_state is NodeHealth.STABLE
    assert not rig.processes()


def test_server_that_starts_before_slurm_learns_the_nodes_later(own_bed):
    own_bed.stop_controller()
    rig = SlurmRig(own_bed)
    try:
        assert rig.backend.inventory().unreachable
        assert rig.backend.inventory().nodes == ()
        own_bed.start_controller()
        rig.wait(lambda: len(rig.backend.inventory().nodes) == 2)
        told = [o.node.name for o in rig.backend.observe(0)[0] if isinstance(o, NodeChanged)]
        assert sorted(told) == ["here", "there"]
    finally:
        rig.close()


def test_controller_that_hangs_blocks_nobody_and_doubles_nothing(breakable):
    rig = breakable
    rig.bed.pause_controller()
    began = time.monotonic()
    rig.backend.launch([order("echo once", 1)])
    rig.backend.stop([StopOrder(key=LeaseKey(job=9, epoch=1), kind="cancel", kill_after_s=1)])
    rig.backend.inventory()
    rig.look()
    assert time.monotonic() - began < 0.5
    time.sleep(4)
    rig.bed.resume_controller()
    rig.wait(lambda: not rig.backend.inventory().unreachable)
    rig.backend.launch([order("echo once", 1)])
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]
    time.sleep(1)
    assert rig.log(1) == "once\n"
    assert rig.starts(1) == 1


def test_node_that_slurm_declares_down(breakable):
    rig = breakable
    rig.backend.launch([order("runs", 1)])
    rig.ready(1)
    rig.bed.run("scontrol", "update", "NodeName=here", "State=DOWN", "Reason=burnt")
    assert rig.until(1, "Freed") == ["Started", "LeaseExpired", "Freed"]
    assert rig.of(1)[1].node_state is NodeHealth.OFFLINE


def test_node_without_power(breakable):
    rig = breakable
    rig.backend.launch([order("runs", 1)])
    rig.ready(1)
    rig.bed.kill_node("here")
    rig.bed.run("scontrol", "update", "NodeName=here", "State=DOWN", "Reason=no power")
    rig.until(1, "Freed")
    lost = [o for o in rig.of(1) if isinstance(o, LeaseExpired)]
    assert [o.node_state for o in lost] == [NodeHealth.OFFLINE]
    assert node(rig).drain_reason.startswith("Slurm: DOWN")
    assert node(rig, "there").health is NodeHealth.STABLE


def test_drained_node_says_slurms_reason(breakable):
    rig = breakable
    rig.bed.run("scontrol", "update", "NodeName=here", "State=DRAIN", "Reason=new fans")
    rig.wait(lambda: node(rig).health is NodeHealth.OFFLINE)
    assert node(rig).drain_reason == "Slurm: DRAIN, new fans"
    told = [o.node for o in rig.backend.observe(0)[0] if isinstance(o, NodeChanged)]
    assert told[-1].drain_reason == "Slurm: DRAIN, new fans"
    rig.bed.run("scontrol", "update", "NodeName=here", "State=RESUME")
    rig.wait(lambda: node(rig).health is NodeHealth.STABLE)
    assert node(rig).drain_reason == ""


@pytest.mark.parametrize("script", [LOOP, f"trap 'sleep 0.2; exit 0' TERM; {LOOP}"])
def test_preempted_is_given_back_even_if_it_saved_and_ended_well(own_bed, script):
    mapped = Mapped(tiers={"rtx4090": "RTX4090"}, partitions={"RTX4090": PREEMPTIBLE})
    rig = SlurmRig(own_bed, mapped=mapped)
    try:
        rig.backend.launch([order(script, 1)])
        rig.ready(1)
        other_job(rig, "rtx4090", 2)
        assert rig.until(1, "Freed") == ["Started", "Returned", "Freed"]
    finally:
        rig.close()


def test_forgotten_by_slurm_but_not_by_the_run_directory():
    with made(NodeSpec("here"), min_job_age_s=2) as bed:
        rig = SlurmRig(bed)
        try:
            rig.backend.launch([order("fails", 1)])
            rig.until(1, "Started")
            rig.backend.close()
            rig.wait(lambda: not rig.slurm_jobs())
            rig.open()
            assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]
            assert rig.exited(1).evidence.exit_code == 3
        finally:
            rig.close()


def test_out_of_host_memory_is_slurms_word():
    if not memory_cgroups():
        pytest.skip("no writable cgroup v1 memory controller: Slurm 22.05 cannot limit memory")
    with made(NodeSpec("here"), cgroup=True) as bed:
        rig = SlurmRig(bed)
        try:
            script = "python3 -S -c 'bytearray(300 << 20)'"
            rig.backend.launch([order(script, 1, memory_mib=100)])
            evidence = rig.exited(1).evidence
            assert evidence.scheduler_state == "OUT_OF_MEMORY"
            assert oom_kind(evidence).value == "host"
            assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]
        finally:
            rig.close()


def memory_cgroups() -> bool:
    top = Path("/sys/fs/cgroup/memory")
    probe = top / "dure-probe"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def test_the_testbed_leaves_no_process():
    with made(NodeSpec("here")) as bed:
        bed.run("sbatch", "-p", "rtx4090", "-D", "/", "-o", "/dev/null", "--wrap", "sleep 6017")
        bed.wait(lambda: "RUNNING" in bed.run("squeue", "-h", "-o", "%T"), 10, "not started")
        bed.wait(lambda: running("6017"), 10, "no process")
        folder = bed.folder
    assert not running("6017")
    assert not running(str(folder))
    assert not folder.exists()


def running(words: str) -> list[int]:
    return [pid for pid in pids() if words.encode() in read(f"/proc/{pid}/cmdline")]
