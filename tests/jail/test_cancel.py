"""One way of stopping, under every runtime: SIGTERM once, a checkpoint, nothing left."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time

import pytest

from tests.jail.rigs import JailRig

DAEMON = (
    "import signal, time; signal.signal(15, signal.SIG_IGN); open('daemon', 'w'); time.sleep(60)"
)
SAVES = f"""
import os, signal, subprocess, sys, time
rank = os.environ.get("RANK", "")
def term(number, frame):
    with open("terms" + rank, "a") as file:
        file.write("TERM\\n")
    time.sleep(0.3)
    open("checkpoint" + rank, "w").close()
    os._exit(12)
signal.signal(signal.SIGTERM, term)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
if "daemon" in sys.argv:
    subprocess.Popen([sys.executable, "-c", {DAEMON!r}], start_new_session=True)
    while not os.path.exists("daemon"):
        time.sleep(0.01)
open("ready" + rank, "w").close()
time.sleep(60)
"""
LAUNCHER = """
import os, signal, subprocess, sys
code = sys.argv[1]
env = [dict(os.environ, RANK=str(rank)) for rank in range(2)]
ranks = [subprocess.Popen([sys.executable, "-c", code], env=e, start_new_session=True) for e in env]
signal.signal(signal.SIGTERM, lambda *_: None)
codes = [rank.wait() for rank in ranks]
sys.exit(max(codes))
"""
KINDS = ("process", "bubblewrap", "bubblewrap-root", "apptainer")


@pytest.fixture(params=KINDS)
def rig(request, make) -> JailRig:
    return make(request.param)


def ready(rig: JailRig, *names: str) -> None:
    for name in names or ("ready",):
        rig.wait((rig.out(1) / name).exists)


def cancel(rig: JailRig, kill_after_s: float = 15) -> dict[str, object]:
    rig.stop(kill_after_s)
    rig.stop(kill_after_s)  # asked twice, sent once
    rig.until(1, "Freed")
    rig.nothing_left()
    ended = rig.exit()
    assert ended["term"]
    assert ended["term"]["boot_ms"] <= ended["ended"]["boot_ms"]
    return ended


def test_python_saves_its_checkpoint(rig):
    rig.launch("python3", "-c", SAVES)
    ready(rig)
    ended = cancel(rig)
    assert (ended["exit_code"], ended["signal"], ended["killed"]) == (12, None, None)
    assert (rig.out(1) / "terms").read_text() == "TERM\n"
    assert (rig.out(1) / "checkpoint").exists()


def test_python_below_a_shell_saves_its_checkpoint(rig):
    rig.launch("bash", "-c", 'python3 -c "$0"; echo the shell goes on', SAVES)
    ready(rig)
    ended = cancel(rig)
    assert ended["killed"] is None
    assert (rig.out(1) / "terms").read_text() == "TERM\n"
    assert (rig.out(1) / "checkpoint").exists()


def test_both_ranks_of_a_launcher_save(rig):
    rig.launch("python3", "-c", LAUNCHER, SAVES)
    ready(rig, "ready0", "ready1")
    ended = cancel(rig)
    assert (ended["exit_code"], ended["killed"]) == (12, None)
    for rank in "01":
        assert (rig.out(1) / f"terms{rank}").read_text() == "TERM\n"
        assert (rig.out(1) / f"checkpoint{rank}").exists()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed here")
def test_both_ranks_of_torchrun_save(rig):
    script = "import sys; exec(sys.argv[1])"
    (rig.root.parent / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    rig.launch(*command, sys.executable, "-c", SAVES)
    ready(rig, "ready0", "ready1")
    cancel(rig)
    assert all((rig.out(1) / f"checkpoint{rank}").exists() for rank in "01")


def test_a_daemon_that_ignores_it_is_killed_after_the_checkpoint(rig):
    rig.launch("python3", "-c", SAVES, "daemon")
    ready(rig)
    ended = cancel(rig, kill_after_s=1.2)
    assert ended["exit_code"] == 12
    assert (rig.out(1) / "checkpoint").exists()
    assert 1150 <= ended["killed"]["boot_ms"] - ended["term"]["boot_ms"] < 4000


def test_who_ignores_it_is_killed_in_time_and_not_before(rig):
    rig.launch("bash", "-c", "trap '' TERM; touch ready; while :; do sleep 0.05; done")
    ready(rig)
    ended = cancel(rig, kill_after_s=0.6)
    assert (ended["exit_code"], ended["signal"]) == (None, signal.SIGKILL)
    assert 580 <= ended["killed"]["boot_ms"] - ended["term"]["boot_ms"] < 3000


def test_a_signal_before_the_time_limit_reaches_who_catches_it(rig):
    script = "trap 'echo warned' USR1; trap 'exit 3' TERM; sleep 60 & touch ready; while :; do sleep 0.05; done"
    rig.launch(
        "bash",
        "-c",
        script,
        time_limit_s=3,
        pre_stop_signal="SIGUSR1",
        pre_stop_before_s=2,
        kill_after_s=5,
    )
    rig.until(1, "Freed")
    rig.nothing_left()
    evidence = rig.exited(1).evidence
    assert (evidence.exit_code, evidence.timed_out) == (3, True)
    assert rig.log().splitlines().count("warned") == 1
    assert evidence.term_ms
    assert not evidence.kill_ms


def test_what_is_left_when_the_command_ends_is_stopped(rig):
    daemon = "trap '' TERM; touch ready; while :; do sleep 0.05; done"
    script = 'setsid bash -c "$0" & while [ ! -e ready ]; do sleep 0.01; done; exit 4'
    rig.launch("bash", "-c", script, daemon)
    assert rig.exited(1).evidence.exit_code == 4
    assert "Freed" not in rig.names(1)
    rig.until(1, "Freed")
    rig.nothing_left()


def test_an_orphan_of_a_killed_supervisor_still_saves(rig):
    rig.launch("python3", "-c", SAVES)
    ready(rig)
    os.kill(rig.supervisor(1), signal.SIGKILL)
    assert "LeaseExpired" in rig.until(1, "Freed")
    rig.wait(lambda: not rig.left())
    assert (rig.out(1) / "terms").read_text() == "TERM\n"
    assert (rig.out(1) / "checkpoint").exists()
    rig.wait(lambda: rig.groups() == [])


def test_a_stop_that_comes_with_the_start(rig):
    rig.launch("bash", "-c", "sleep 60")
    rig.stop(5)
    began = time.monotonic()
    rig.until(1, "Freed")
    assert time.monotonic() - began < 8
    rig.nothing_left()
