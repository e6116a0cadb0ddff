"""The supervisor alone, run as the backend runs it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dure.adapters.compute.local.processes import marked, processes
from dure.adapters.compute.local.rundir import Exit, RunDir
from dure.adapters.compute.local.spawn import SUPERVISOR

ARGV = [sys.executable, "-I", "-S", "-X", "utf8", SUPERVISOR]
READY = "touch ready; while :; do sleep 0.05; done"


def until(what, seconds: float = 8.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = what()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError("it did not happen")


class Run:
    """One supervised command in a folder of its own."""

    def __init__(self, path: Path, *argv: str, **spec: object) -> None:
        self.path = path
        self.dir = RunDir(path)
        self.dir.create()
        self.marks = [f"JOB_OUTPUT_DIR={path / 'out'}", "JOB_ID=7", "DURE_JOB_EPOCH=1"]
        env = dict(mark.split("=", 1) for mark in self.marks) | {"PATH": os.environ["PATH"]}
        values = {"argv": argv, "env": env, "cwd": "out", "marks": self.marks}
        values |= {"leftover_kill_s": 5, **spec}
        (path / "spec.json").write_text(json.dumps(values))
        self.supervisors: list[subprocess.Popen] = []

    def start(self) -> Run:
        self.supervisors.append(subprocess.Popen([*ARGV, str(self.path)], stdin=subprocess.DEVNULL))
        return self

    def ready(self) -> Run:
        until((self.path / "out" / "ready").exists)
        return self

    def stop(self, kill_after_s: float, kind: str = "cancel") -> None:
        with until(self.dir.connect) as sock:
            sock.sendall(json.dumps({"stop": kind, "kill_after_s": kill_after_s}).encode() + b"\n")

    def end(self) -> Exit:
        for supervisor in self.supervisors:
            assert supervisor.wait(15) == 0
        ended = self.dir.exit()
        assert ended is not None
        assert ended.freed is not None
        assert not self.left()
        return ended

    def left(self) -> set[int]:
        return marked(processes(), self.marks)

    def log(self) -> str:
        return self.dir.log.read_text()


@pytest.fixture
def run(tmp_path):
    made: list[Run] = []

    def make(*argv: str, **spec: object) -> Run:
        made.append(Run(tmp_path / f"run{len(made)}", *argv, **spec))
        return made[-1].start()

    yield make
    for one in made:
        for supervisor in one.supervisors:
            supervisor.kill()
            supervisor.wait()
        for pid in one.left():
            os.kill(pid, signal.SIGKILL)


def test_exit_code_output_and_times(run):
    one = run("sh", "-c", "echo out; echo err >&2; exit 3")
    ended = one.end()
    status = one.dir.status()
    assert (ended.exit_code, ended.signal, ended.timed_out) == (3, None, False)
    assert ended.stderr_tail == one.log() == "out\nerr\n"
    assert status.started.boot_ms <= ended.ended.boot_ms <= ended.freed.boot_ms
    assert status.boot_id == ended.boot_id
    assert not (one.path / "ctl.sock").exists()


def test_signal_is_told_as_a_signal(run):
    ended = run("sh", "-c", "kill -SEGV $$").end()
    assert (ended.exit_code, ended.signal) == (None, signal.SIGSEGV)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("/no/such/program",), 127, "No such file"),
        (("no-such-program",), 127, "No such file"),
        (("/etc/passwd",), 126, "Permission denied"),
    ],
)
def test_what_cannot_be_executed(run, argv, code, words):
    one = run(*argv)
    assert one.end().exit_code == code
    assert f"dure: cannot run '{argv[0]}': {words}" in one.log()


def test_missing_folder_is_named(run):
    one = run("true", cwd="/no/such/folder")
    assert one.end().exit_code == 127
    assert "cannot run '/no/such/folder'" in one.log()


def test_second_supervisor_leaves_at_once(run):
    one = run("sh", "-c", "echo x; " + READY).ready()
    assert subprocess.run([*ARGV, str(one.path)], check=False, timeout=5).returncode == 0
    assert one.dir.is_alive()
    one.stop(0.1)
    one.end()
    assert one.log() == "x\n"
    assert subprocess.run([*ARGV, str(one.path)], check=False, timeout=5).returncode == 0
    assert one.log() == "x\n"


def test_job_sees_only_its_own_world(run):
    code = "import os; print(sorted(os.environ), os.listdir('/proc/self/fd'), os.getsid(0) == os.getpid())"
    one = run(sys.executable, "-S", "-c", code)
    assert one.end().exit_code == 0
    text = one.log()
    assert "'JOB_ID'" in text
    assert "HOME" not in text
    assert "['0', '1', '2', '3']" in text  # 3 is the listing itself
    assert text.endswith("True\n")


def test_signals_have_their_default_action(run):
    one = run("cat", "/proc/self/status")
    one.end()
    ignored = [
        line.split()[1] for line in one.log().splitlines() if line[:6] in ("SigIgn", "SigBlk")
    ]
    # Signals 1 to 31; 32 and 33 are the C library's own and nobody can set them.
    assert [int(x, 16) & 0x7FFFFFFF for x in ignored] == [0, 0]


def test_term_is_sent_once_and_the_checkpoint_is_kept(run):
    script = (
        "trap 'echo TERM' TERM; touch ready; for i in 1 2 3 4 5 6; do sleep 0.1; done; echo saved"
    )
    one = run("bash", "-c", script).ready()
    one.stop(20)
    one.stop(20)
    assert one.end().exit_code == 0
    assert one.log().count("TERM\n") == 1
    assert one.log().endswith("saved\n")


def test_every_process_gets_term(run):
    child = "import signal, time\ndef f(*a):\n print('child', flush=True); raise SystemExit\nsignal.signal(15, f)\nopen('ready', 'w')\ntime.sleep(60)"
    script = f"trap 'wait; echo parent' TERM; setsid {sys.executable} -S -c \"$0\" & wait"
    one = run("bash", "-c", script, child).ready()
    one.stop(10)
    one.end()
    assert one.log() == "child\nparent\n"


def test_who_ignores_term_is_killed_in_time_not_before(run):
    one = run("bash", "-c", "trap '' TERM; " + READY).ready()
    begun = time.monotonic()
    one.stop(0.5)
    ended = one.end()
    assert 0.5 <= time.monotonic() - begun < 3
    assert ended.signal == signal.SIGKILL


def test_shorter_kill_time_wins_and_a_longer_one_does_not(run):
    one = run("bash", "-c", "trap '' TERM; " + READY).ready()
    begun = time.monotonic()
    one.stop(60)
    one.stop(0.4, "drain")
    one.stop(90)
    one.end()
    assert 0.3 <= time.monotonic() - begun < 3


def test_after_a_cancel_leftovers_have_the_cancels_time(run):
    """Nothing may be killed that is still saving, even if its parent is gone."""
    saver = "trap '' TERM; touch ready; sleep 0.8; echo saved"
    one = run("bash", "-c", 'setsid bash -c "$0" & sleep 60', saver, leftover_kill_s=0.1).ready()
    one.stop(20)
    one.end()
    assert one.log() == "saved\n"


def test_leftover_holds_until_it_is_gone(run):
    one = run(
        "bash",
        "-c",
        "setsid bash -c 'trap \"\" TERM; touch ready; sleep 0.6' & while [ ! -e ready ]; do sleep 0.01; done",
    )
    ended = one.end()
    assert ended.exit_code == 0
    assert ended.freed.boot_ms - ended.ended.boot_ms >= 300


def test_exit_is_told_while_leftovers_live(run):
    daemon = "trap '' TERM; touch ready; while :; do sleep 0.05; done"
    one = run(
        "bash",
        "-c",
        'setsid bash -c "$0" & while [ ! -e ready ]; do sleep 0.01; done; exit 4',
        daemon,
        leftover_kill_s=1,
    )
    early = until(one.dir.exit)
    assert (early.exit_code, early.freed) == (4, None)
    ended = one.end()
    assert 950 <= ended.freed.boot_ms - ended.ended.boot_ms < 3000


def test_process_outside_the_tree_is_found_by_its_marks(run):
    one = run("sh", "-c", READY).ready()
    env = dict(mark.split("=", 1) for mark in one.marks)
    stranger = subprocess.Popen(["/bin/sleep", "60"], env=env)
    try:
        one.stop(5)
        assert until(lambda: stranger.poll() is not None)
        one.end()
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_that_keeps_hopping_into_new_sessions_is_killed(run):
    # A chain, never a tree: each process forks one successor into a new session and goes.
    # (An unbounded bomb here once took the whole test machine down.)
    bomb = "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nopen('ready','w')\nfor _ in range(5000):\n time.sleep(0.005)\n if os.fork(): os._exit(0)\n os.setsid()\n"
    one = run(sys.executable, "-S", "-c", bomb).ready()
    one.stop(0.2)
    one.end()


def test_time_limit_with_exit_0_in_the_grace(run):
    one = run("bash", "-c", "trap 'exit 0' TERM; " + READY, time_limit_s=0.4, kill_after_s=5)
    ended = one.end()
    assert (ended.exit_code, ended.timed_out) == (0, True)
    assert ended.ended.boot_ms - one.dir.status().started.boot_ms >= 390


def test_time_limit_kills_who_ignores_it(run):
    one = run("bash", "-c", "trap '' TERM; " + READY, time_limit_s=0.2, kill_after_s=0.3)
    ended = one.end()
    assert (ended.signal, ended.timed_out) == (signal.SIGKILL, True)


def test_a_cancelled_job_may_save_beyond_its_limit(run):
    one = run(
        "bash",
        "-c",
        "trap 'sleep 0.6; echo saved; exit 0' TERM; " + READY,
        time_limit_s=0.5,
        kill_after_s=0,
    ).ready()
    one.stop(10)
    ended = one.end()
    assert one.log().endswith("saved\n")
    assert not ended.timed_out


def test_pre_stop_signal_goes_to_who_catches_it(run):
    script = (
        "trap 'echo warned; exit 0' USR1; touch ready; while :; do sleep 0.05 || echo lost; done"
    )
    one = run(
        "bash", "-c", script, time_limit_s=1.5, pre_stop_signal="SIGUSR1", pre_stop_before_s=1.0
    )
    ended = one.end()
    assert one.log() == "warned\n"
    assert not ended.timed_out


def test_memory_limit_is_real(run):
    code = "x = bytearray(400 << 20)"
    one = run(sys.executable, "-S", "-c", code, data_limit_mib=200)
    ended = one.end()
    assert (ended.exit_code, ended.vram_limited) == (1, True)
    assert ended.stderr_tail.rstrip().endswith("MemoryError")
    assert run(sys.executable, "-S", "-c", code, data_limit_mib=900).end().exit_code == 0


def test_log_limit_drops_the_rest_and_the_job_goes_on(run):
    code = "import os\nfor _ in range(80): os.write(1, b'x' * 65536)\nopen('done', 'w')"
    one = run(sys.executable, "-S", "-c", code, log_limit_mib=2)
    ended = one.end()
    assert (ended.exit_code, ended.full) == (0, ("log",))
    assert (one.dir.out / "done").exists()
    assert one.log().endswith("the log reached its limit of 2 MiB; the rest is missing\n")
    assert one.log().count("x") == 2 << 20


def test_full_output_folder_fails_the_write_not_the_job(run):
    code = """
import os, time
def write(name):
    try:
        with open(name, "wb") as file:
            file.write(b"x" * 1_000_000)
    except OSError as error:
        return error.errno
names = [f"part{n}" for n in range(400)]
for number, name in enumerate(names):
    if write(name) == 27:
        break
    time.sleep(0.05)
print("refused", 4 <= number < 399)
for name in names[:number]:
    os.unlink(name)
end = time.monotonic() + 9
while write("again") and time.monotonic() < end:
    time.sleep(0.05)
print("again", os.path.getsize("again"))
"""
    one = run(sys.executable, "-S", "-c", code, output_limit_mib=4, quota_every_s=0.2)
    ended = one.end()
    assert (ended.exit_code, ended.full) == (0, ("output",))
    assert "the output folder reached its limit of 4 MiB" in one.log()
    assert one.log().endswith("refused True\nagain 1000000\n")


def test_one_file_cannot_pass_the_output_limit(run):
    code = "import errno\ntry: open('big', 'wb').write(b'x' * (3 << 20))\nexcept OSError as e: print(e.errno == errno.EFBIG)"
    one = run(sys.executable, "-S", "-c", code, output_limit_mib=2)
    assert one.end().exit_code == 0
    assert one.log().startswith("True\n")


def test_flood_neither_blocks_nor_fills_memory(run):
    one = run(
        "sh", "-c", "head -c 200000000 /dev/zero | tr '\\0' x; echo; echo last words >&2; exit 1"
    )
    ended = one.end()
    assert len(ended.stderr_tail) == 16_384
    assert ended.stderr_tail.endswith("last words\n")


def test_term_to_the_supervisor_does_not_matter(run):
    one = run("bash", "-c", READY, time_limit_s=10**8).ready()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        one.supervisors[0].send_signal(number)
    time.sleep(0.1)
    assert one.dir.is_alive()
    assert one.dir.exit() is None
    one.stop(5)
    assert one.end().signal == signal.SIGTERM


def test_stop_before_the_start_starts_nothing(tmp_path, run):
    one = Run(tmp_path / "early", "sh", "-c", "echo ran")
    (one.path / "stop.json").write_text('{"stop": "cancel", "kill_after_s": 300}')
    ended = one.start().end()
    assert (ended.exit_code, ended.signal, ended.stderr_tail) == (
        None,
        None,
        "stopped before it started",
    )
    assert one.dir.status() is None


def test_events_are_told_also_to_who_comes_late(run):
    one = run("bash", "-c", "trap 'exit 0' TERM; " + READY).ready()
    with until(one.dir.connect) as sock:
        sock.setblocking(True)
        sock.sendall(b"nonsense\n{}\n[]\n")
        with sock.makefile("rb") as lines:
            assert json.loads(lines.readline()) == {"event": "started"}
            one.stop(5)
            assert [json.loads(line)["event"] for line in lines] == ["exited", "freed"]
    one.end()


def test_first_client_on_standard_input(tmp_path):
    one = Run(tmp_path / "stdin", "sh", "-c", "cat; echo done")
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([*ARGV, str(one.path)], stdin=theirs) as supervisor:
        theirs.close()
        with ours.makefile("rb") as lines:
            events = [json.loads(line)["event"] for line in lines]
        assert supervisor.wait(5) == 0
    assert events == ["started", "exited", "freed"]
    assert one.log() == "done\n"


def test_output_of_an_earlier_attempt_is_copied(tmp_path, run):
    old = tmp_path / "old"
    (old / "deep").mkdir(parents=True)
    (old / "deep" / "ckpt").write_bytes(b"weights" * 1000)
    (old / "tool").write_text("#!/bin/sh\n")
    (old / "tool").chmod(0o755)
    (old / "link").symlink_to("/etc/shadow")
    (old / "dirlink").symlink_to("/etc")
    os.mkfifo(old / "fifo")
    one = Run(tmp_path / "new", "sh", "-c", "ls -R .", copy_from=str(old))
    (one.path / "out.part").mkdir()
    (one.path / "out.part" / "half").write_text("of a copy that crashed")
    assert one.start().end().exit_code == 0
    out = one.dir.out
    assert (out / "deep" / "ckpt").read_bytes() == b"weights" * 1000
    assert (out / "link").readlink() == Path("/etc/shadow")
    assert (out / "dirlink").readlink() == Path("/etc")
    assert os.access(out / "tool", os.X_OK)
    assert sorted(p.name for p in out.iterdir()) == ["deep", "dirlink", "link", "tool"]
    assert not (one.path / "out.part").exists()


def test_copy_that_fails_is_not_a_silent_start_from_zero(tmp_path):
    one = Run(tmp_path / "new", "echo", "ran", copy_from=str(tmp_path / "gone"))
    ended = one.start().end()
    assert ended.exit_code == 125
    assert "could not be copied" in ended.stderr_tail
    assert "ran" not in one.log()


def test_long_path(tmp_path):
    one = Run(tmp_path / ("d" * 120) / ("e" * 120), "bash", "-c", READY)
    one.start().ready().stop(5)
    assert one.end().signal == signal.SIGTERM


def test_supervisor_that_fails_says_so_in_the_log(tmp_path):
    one = Run(tmp_path / "bad", "true")
    (one.path / "ctl.sock").mkdir()
    assert subprocess.run([*ARGV, str(one.path)], check=False, timeout=5).returncode == 1
    assert one.log().startswith("dure: the supervisor failed: IsADirectoryError")
