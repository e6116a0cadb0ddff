"""The local backend alone: real processes, crashes, memory limits, output folders."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dure.adapters.compute.local.rundir import Spec, Stop
from dure.core.model import NodeHealth
from dure.ports import Beat, LaunchStatus, LeaseKey, StopKind, StopOrder
from tests.contract.backends import LOOP, LocalRig, order

KEY = LeaseKey(job=1, epoch=1)


@pytest.fixture
def rig(tmp_path):
    made = LocalRig(tmp_path)
    yield made
    made.close()


def cancel(rig: LocalRig, kill_after_s: float, job: int = 1) -> None:
    key = LeaseKey(job=job, epoch=1)
    rig.backend.stop([StopOrder(key=key, kind=StopKind.CANCEL, kill_after_s=kill_after_s)])


def log(rig: LocalRig, epoch: int = 1) -> str:
    path = rig.backend.log_path(LeaseKey(job=1, epoch=epoch))
    return Path(path).read_text()


def run(rig: LocalRig, script: str, epoch: int = 1, **fields: object) -> str:
    rig.backend.launch([order(script, 1, epoch, **fields)])
    rig.until(1, "Freed", epoch)
    return log(rig, epoch)


def test_environment_is_the_jobs_own(rig, monkeypatch):
    monkeypatch.setenv("SERVER_PASSWORD", "hunter2")
    env = {"JOB_ID": "0", "CUDA_VISIBLE_DEVICES": "0", "MINE": "é=1", "PATH": os.environ["PATH"]}
    text = run(rig, "env", epoch=3, env=env, start_no=2)
    lines = set(text.splitlines())
    out = rig.out(1, 3)
    assert {"JOB_ID=1", "JOB_ATTEMPT=2", "DURE_JOB_EPOCH=3", "MINE=é=1"} <= lines
    assert {"CUDA_VISIBLE_DEVICES=", f"JOB_OUTPUT_DIR={out}", f"PWD={out}"} <= lines
    assert "hunter2" not in text
    assert "secret" not in text
    assert rig.backend.output_dir(LeaseKey(job=1, epoch=3)) == str(out)


def test_folders_are_private(rig):
    run(rig, "true")
    folder = rig.root / "1" / "1"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "spec.json").stat().st_mode & 0o077 == 0


def test_workdir_is_where_it_runs(rig, tmp_path):
    assert run(rig, "pwd", workdir=str(tmp_path)) == f"{tmp_path}\n"


@pytest.mark.parametrize("workdir", ["/no/such", "/etc/passwd", "/bad\0name"])
def test_bad_workdir_is_refused_with_a_sentence(rig, workdir):
    (answer,) = rig.backend.launch([order("true", 1, workdir=workdir)])
    assert answer.status is LaunchStatus.REFUSED
    assert answer.reason.startswith("workdir /")


def test_cannot_be_executed(rig):
    rig.backend.launch([order("x", 1, command=("no-such-program",))])
    end = rig.exited(1)
    assert end.evidence.exit_code == 127
    assert "no-such-program" in end.evidence.stderr_tail


def test_next_attempt_finds_the_checkpoint(rig):
    run(rig, "echo step 5 > $JOB_OUTPUT_DIR/ckpt; exit 1")
    rig.acknowledge()
    script = "cat ckpt; echo step 9 > ckpt"
    assert run(rig, script, epoch=2, copy_from_epoch=1) == "step 5\n"
    assert (rig.out(1, 1) / "ckpt").read_text() == "step 5\n"
    # Epoch 3 never had a folder: the newest one that exists is taken.
    assert run(rig, "cat ckpt", epoch=4, copy_from_epoch=3) == "step 9\n"


def test_memory_of_a_simulated_slot_is_a_real_limit(rig):
    code = "bytearray(400 << 20)"
    rig.backend.launch([order("x", 1, command=("python3", "-S", "-c", code), vram_mib=200)])
    evidence = rig.exited(1).evidence
    assert (evidence.exit_code, evidence.vram_limited) == (1, True)
    assert "MemoryError" in evidence.stderr_tail


def test_time_limit_works_without_the_server(rig):
    script = f"trap 'exit 0' TERM; {LOOP}"
    rig.backend.launch([order(script, 1, time_limit_s=1)])
    rig.ready(1)
    rig.backend.close()
    rig.wait(lambda: not rig.left())
    rig.open()
    evidence = rig.exited(1).evidence
    assert (evidence.exit_code, evidence.timed_out) == (0, True)


def test_daemon_that_ignores_term_is_killed(rig):
    daemon = "setsid bash -c 'trap \"\" TERM; touch ready; while :; do sleep 0.05; done' & "
    rig.backend.launch([order(daemon + "while [ ! -e ready ]; do sleep 0.01; done", 1)])
    assert rig.exited(1).evidence.exit_code == 0
    assert "Freed" not in rig.names(1)
    assert rig.freed(1).at_ms - rig.exited(1).at_ms >= 1900
    rig.wait(lambda: not rig.left())


def test_killed_supervisor_leaves_an_orphan_that_is_ended(rig):
    rig.backend.launch([order(f"trap '' TERM; {LOOP}", 1)])
    rig.ready(1)
    os.kill(rig.supervisor(1), signal.SIGKILL)
    assert rig.until(1, "LeaseExpired") == ["Started", "LeaseExpired"]
    assert rig.left()
    expired = rig.of(1)[1]
    assert expired.node_state is NodeHealth.STABLE
    freed = rig.freed(1)
    assert freed.at_ms - expired.at_ms >= 380
    assert not rig.left()
    assert rig.names(1) == ["Started", "LeaseExpired", "Freed"]
    rig.acknowledge()
    assert rig.look() == []  # asked with the new cursor: recorded
    rig.restart()
    rig.sleep(0.1)
    assert rig.names(1) == []


def test_supervisor_killed_while_the_server_is_away(rig):
    rig.backend.launch([order(LOOP, 1)])
    rig.ready(1)
    rig.backend.close()
    os.kill(rig.supervisor(1), signal.SIGKILL)
    rig.open()
    assert rig.until(1, "Freed") == ["Started", "LeaseExpired", "Freed"]
    assert not rig.left()


def test_supervisor_killed_before_it_started_is_replaced(rig, monkeypatch):
    real = rig.backend._spawner.spawn
    pids = []

    def spawn(run):
        pid, link = real(run)
        if not pids:
            os.kill(pid, signal.SIGKILL)
        pids.append(pid)
        return pid, link

    monkeypatch.setattr(rig.backend._spawner, "spawn", spawn)
    rig.backend.launch([order("succeeds", 1)])
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]
    assert len(pids) == 2


def test_supervisor_that_never_starts_is_lost_after_the_second(rig, monkeypatch):
    real = rig.backend._spawner.spawn

    def spawn(run):
        pid, link = real(run)
        os.kill(pid, signal.SIGKILL)
        return pid, link

    monkeypatch.setattr(rig.backend._spawner, "spawn", spawn)
    rig.backend.launch([order("succeeds", 1)])
    assert rig.until(1, "Freed") == ["LeaseExpired", "Freed"]


def test_server_that_dies_before_the_spawn(rig, monkeypatch):
    monkeypatch.setattr(rig.backend._watch, "enqueue", lambda held: None)
    rig.backend.launch([order("succeeds", 1)])
    rig.restart()
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]


def test_machine_that_cannot_spawn_now_is_asked_again(rig, monkeypatch):
    real = rig.backend._spawner.spawn
    failures = [BlockingIOError(11, "Resource temporarily unavailable")]

    def spawn(run):
        if failures:
            raise failures.pop()
        return real(run)

    monkeypatch.setattr(rig.backend._spawner, "spawn", spawn)
    (answer,) = rig.backend.launch([order("succeeds", 1)])
    assert answer.status is LaunchStatus.ACCEPTED
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]


def test_machine_restart_is_told_as_offline(rig):
    rig.backend.close()
    run_dir = rig.backend._shelf.run(KEY)
    rig.backend._shelf.open(KEY)
    run_dir.create()
    run_dir.write("spec.json", Spec(argv=("true",), env={}, cwd="", marks=("A=b",), boot_id="old"))
    (run_dir.path / "lock").touch()
    rig.open()
    rig.until(1, "Freed")
    expired, _ = rig.of(1)
    assert expired.node_state is NodeHealth.OFFLINE


def test_two_launches_at_once_make_one_process(rig):
    barrier = threading.Barrier(4)

    def launch():
        barrier.wait()
        rig.backend.launch([order("echo once", 1)])

    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.until(1, "Freed")
    assert log(rig) == "once\n"


def test_two_servers_on_one_folder_make_one_process(rig):
    other = LocalRig(rig.root.parent)
    try:
        other.backend.launch([order("echo once; sleep 0.3", 1)])
        rig.backend.launch([order("echo once; sleep 0.3", 1)])
        assert other.until(1, "Freed") == ["Started", "Exited", "Freed"]
    finally:
        other.backend.close()
    assert log(rig) == "once\n"


def test_stop_asked_before_the_supervisor_is_up(rig):
    rig.backend.launch([order("stubborn", 1)])
    cancel(rig, 0.1)
    rig.freed(1)
    assert not (rig.out(1) / "ready").exists() or rig.exited(1).evidence.signal == 9


def test_stop_order_survives_a_restart(rig):
    rig.backend.launch([order("saves", 1)])
    rig.ready(1)
    rig.backend.close()  # dies between writing the order down and sending it
    rig.backend._shelf.run(KEY).write("stop.json", Stop(stop="cancel", kill_after_s=300))
    rig.open()
    assert rig.exited(1).evidence.exit_code == 0


def test_fenced_job_keeps_its_gpu_until_it_is_gone(rig):
    rig.backend.launch([order("stubborn", 1, gpus=(2,))])
    rig.ready(1)
    rig.backend.fence([KEY])
    assert [gpu.foreign for gpu in rig.backend.inventory().nodes[0].gpus] == [0, 0, 1, 0]
    rig.wait(lambda: not any(gpu.foreign for gpu in rig.backend.inventory().nodes[0].gpus))
    rig.wait(lambda: not rig.left())


def test_beats_do_not_pile_up(rig):
    rig.backend.launch([order("runs", 1)])
    rig.ready(1)
    time.sleep(0.35)
    seen, cursor = rig.backend.observe(0)
    assert sum(isinstance(o, Beat) for o in seen) == 1
    rig.wait(lambda: any(isinstance(o, Beat) for o in rig.backend.observe(cursor)[0]))


def test_hints_come_with_news(rig):
    rig.backend.launch([order("succeeds", 1)])
    rig.until(1, "Freed")
    rig.wait(lambda: rig.hints)


def test_a_failing_hint_blinds_nobody(rig, caplog):
    def fail():
        raise RuntimeError("engine")

    rig.backend.watch(fail)
    rig.backend.launch([order("succeeds", 1)])
    rig.until(1, "Freed")
    rig.backend.launch([order("succeeds", 2)])
    rig.until(2, "Freed")


def test_collected_leases_leave_the_scan(rig):
    run(rig, "true")
    rig.acknowledge()
    rig.look()
    assert rig.backend.leases() == []
    assert list((rig.root / "live").iterdir()) == []
    assert rig.backend.log_path(KEY) is not None


def test_a_hundred_launches_do_not_block(rig):
    orders = [order("true", job) for job in range(1, 101)]
    begun = time.monotonic()
    answers = rig.backend.launch(orders)
    assert time.monotonic() - begun < 1
    assert {answer.status for answer in answers} == {LaunchStatus.ACCEPTED}
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if sum(type(o).__name__ == "Freed" for o in rig.look()) == 100:
            break
        time.sleep(0.05)
    assert sum(type(o).__name__ == "Freed" for o in rig.seen) == 100
