"""The real server with real jobs, through the real client."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dure.client import ApiError, JobCancelled, JobTimedOut, OutOfMemory
from dure.core.model import TERMINAL, JobState
from dure.wire import JobIn
from tests.e2e.site import DURE, until

PY = [sys.executable, "-c"]
STARTS = (
    "import os,sys,time;"
    "open(os.path.join(os.environ['JOB_OUTPUT_DIR'], 'mark'), 'a').write('x');"
    "time.sleep(float(sys.argv[1]))"
)


def test_submit_run_result_charge(site) -> None:
    kim = site.member("kim", "BCG")
    job = kim.submit(
        [*PY, "import os; print('hello'); open(os.environ['JOB_OUTPUT_DIR']+'/r','w').write('42')"]
    )
    job.wait(timeout="15s")
    assert b"hello" in kim.read_log(job.id).data
    out = kim.job_out(job.id)
    assert (Path(out.output_dir) / "r").read_text() == "42"
    assert out.placement.simulated
    until(lambda: kim.attempts(job.id)[0].freed_ms, "freed")
    attempt = kim.attempts(job.id)[0]
    run_s = (attempt.freed_ms - attempt.started_ms) / 1000
    charged = float(kim.job_out(job.id).charge.run_tflop_s)
    assert charged == pytest.approx(run_s * 2.0)  # one BIG GPU of 2 TFLOPS
    assert site.audit().returncode == 0


def test_the_first_start_makes_one_administrator_whose_token_only_the_owner_reads(site) -> None:
    token = site.state / "admin-token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert site.admin().me().role == "admin"
    before = token.read_text()
    site.stop()
    site.start()
    assert token.read_text() == before
    assert before.strip().encode() not in (site.state / "dure.db").read_bytes()


def test_kill_9_of_the_server_ten_times_loses_and_doubles_nothing(site) -> None:
    site.member("kim", "BCG"), site.member("lee", "KDG")
    tokens = [kim_token(site, "kim"), kim_token(site, "lee")]
    kim, lee = (site.client(t) for t in tokens)
    rng = random.Random(1)
    jobs = []
    for _ in range(10):
        for user in (kim, lee):
            length = str(rng.choice([0.05, 0.3, 1.5]))
            jobs.append((user, user.submit([*PY, STARTS, length]).id))
        time.sleep(rng.choice([0.0, 0.02, 0.1, 0.4]))
        site.kill()
        time.sleep(rng.choice([0.0, 0.2]))
        site.start()
        kim, lee = site.client(tokens[0]), site.client(tokens[1])
    admin = site.admin()
    until(lambda: all(admin.job_out(i).state in TERMINAL for _, i in jobs), "all jobs end")
    until(lambda: all(a.freed_ms for _, i in jobs for a in admin.attempts(i)), "all GPUs free")
    for _, number in jobs:
        out = admin.job_out(number)
        assert out.state is JobState.COMPLETED, out
        assert (Path(out.output_dir) / "mark").read_text() == "x", (
            f"job {number} started more than once"
        )
        assert out.starts == 1
    audit = site.audit()
    assert audit.returncode == 0, audit.stderr


def test_running_jobs_survive_an_orderly_stop(site) -> None:
    kim = site.member("kim", "BCG")
    job = kim.submit(["sleep", "2"])
    until(lambda: kim.job_out(job.id).state is JobState.RUNNING, "running")
    assert site.stop() == 0
    site.start()
    admin = site.admin()
    until(lambda: admin.job_out(job.id).state is JobState.COMPLETED, "completed")
    assert admin.job_out(job.id).starts == 1


def test_a_setsid_child_keeps_the_gpus_until_it_is_killed(plain_site, tmp_path) -> None:
    site, pid_file = plain_site, tmp_path / "pid"
    kim = site.member("kim", "BCG")
    daemon = (
        "import os,signal,sys,time\n"
        "if os.fork() == 0:\n"
        "    os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"    open({str(pid_file)!r},'w').write(str(os.getpid())); time.sleep(60)\n"
        "time.sleep(0.3)\n"
    )
    first = kim.submit([*PY, daemon], gpus=2, tiers=["BIG"])
    until(lambda: kim.job_out(first.id).state is JobState.COMPLETED, "completed")
    second = kim.submit(["true"], gpus=2, tiers=["BIG"])
    ended = kim.attempts(first.id)[0].ended_ms
    until(lambda: kim.job_out(second.id).state is JobState.COMPLETED, "second")
    attempt, after = kim.attempts(first.id)[0], kim.attempts(second.id)[0]
    assert attempt.freed_ms - ended >= 1400  # killed at stop_kill_s = 1.5 s, not before
    assert after.dispatched_ms >= attempt.freed_ms
    assert not lives(int(pid_file.read_text()))


def test_after_a_cancel_nothing_is_killed_that_still_saves_and_everything_is_gone_in_time(
    site, tmp_path
) -> None:
    kim = site.member("kim", "BCG")
    saver = (
        "import signal,sys,time,os\n"
        "def save(*_):\n"
        "    time.sleep(2.0); open(os.environ['JOB_OUTPUT_DIR']+'/saved','w').write('all'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); print('ready', flush=True); time.sleep(60)\n"
    )
    deaf = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    saving, ignoring = kim.submit([*PY, saver]), kim.submit([*PY, deaf])
    for job in (saving, ignoring):
        until(lambda job=job: b"ready" in kim.read_log(job.id).data, "ready")
        job.cancel()
    clocks = kim.job_out(ignoring.id).cancel
    assert clocks.checkpoint_until_ms - clocks.asked_ms == 1000
    assert clocks.kill_at_ms - clocks.asked_ms == 3000
    for job in (saving, ignoring):
        with pytest.raises(JobCancelled):
            job.wait(timeout="10s")
    out = kim.job_out(saving.id)
    assert out.exit_code == 0
    assert (Path(out.output_dir) / "saved").read_text() == "all"
    attempt = kim.attempts(ignoring.id)[0]
    assert attempt.signal == 9
    assert 2900 <= attempt.ended_ms - clocks.asked_ms <= 4500


def test_a_job_that_exhausts_its_declared_memory_moves_to_the_larger_slot(site) -> None:
    kim = site.member("kim", "BCG")
    block = kim.submit(["sleep", "1.5"], gpus=2, tiers=["BIG"])
    until(lambda: kim.job_out(block.id).state is JobState.RUNNING, "running")
    hungry = kim.submit([*PY, "x = bytearray(700 << 20); print(len(x))"])
    hungry.wait(timeout="15s")
    tiers = [a.placement.tier for a in kim.attempts(hungry.id)]
    assert tiers == ["SMALL", "BIG"]
    assert kim.attempts(hungry.id)[0].outcome == "gpu_oom"
    glutton = kim.submit([*PY, "x = bytearray(3000 << 20)"])
    with pytest.raises(OutOfMemory):
        glutton.wait(timeout="15s")
    assert kim.job_out(glutton.id).error.code == "OOM_NO_LARGER_TIER"


def test_a_job_that_prints_out_of_memory_and_exits_0_is_completed(site) -> None:
    kim = site.member("kim", "BCG")
    job = kim.submit(
        [*PY, "import sys; print('CUDA out of memory. Tried to allocate 2 GiB', file=sys.stderr)"]
    )
    job.wait(timeout="15s")
    assert kim.job_out(job.id).state is JobState.COMPLETED


def test_a_job_that_deletes_its_own_run_directory_still_ends_and_is_charged(site) -> None:
    kim = site.member("kim", "BCG")
    job = kim.submit(["sh", "-c", "cd $JOB_OUTPUT_DIR/..; rm -rf ../1; sleep 0.3; exit 7"])
    until(lambda: kim.job_out(job.id).state is JobState.FAILED, "failed")
    assert kim.job_out(job.id).exit_code == 7
    until(lambda: kim.attempts(job.id)[0].freed_ms, "freed")
    assert site.audit().returncode == 0


def test_a_killed_supervisor_is_a_counted_loss_and_its_orphan_is_stopped(
    plain_site, tmp_path
) -> None:
    site, pid = plain_site, tmp_path / "pid"
    kim = site.member("kim", "BCG")
    job = kim.submit(
        [*PY, f"import os,time; open({str(pid)!r},'w').write(str(os.getpid())); time.sleep(60)"]
    )
    until(lambda: pid.exists() and pid.read_text(), "running")
    orphan = int(pid.read_text())
    parent = int(Path(f"/proc/{orphan}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(parent, signal.SIGKILL)
    until(lambda: kim.job_out(job.id).retries == 1, "counted")
    assert kim.why(job.id).reason.code == "RETRY_BACKOFF"
    until(lambda: kim.attempts(job.id)[0].freed_ms, "freed")
    assert not lives(orphan)
    assert kim.attempts(job.id)[0].outcome == "lease_expired"
    job.cancel()
    assert site.audit().returncode == 0


def test_time_limit(site) -> None:
    kim = site.member("kim", "BCG")
    job = kim.submit(["sleep", "30"], time="1s")
    with pytest.raises(JobTimedOut):
        job.wait(timeout="15s")


def test_attempt_two_finds_the_checkpoint_of_attempt_one(site) -> None:
    kim = site.member("kim", "BCG")
    script = (
        "import os\n"
        "path = os.environ['JOB_OUTPUT_DIR'] + '/ckpt'\n"
        "if os.path.exists(path): print('found', open(path).read(), os.environ['JOB_ATTEMPT'])\n"
        "else: open(path, 'w').write('epoch 7'); raise SystemExit(1)\n"
    )
    job = kim.submit([*PY, script])
    until(lambda: kim.job_out(job.id).state is JobState.FAILED, "failed")
    job.retry()
    until(lambda: kim.job_out(job.id).state is JobState.COMPLETED, "completed")
    assert b"found epoch 7 2" in kim.read_log(job.id).data


def test_twenty_parallel_submits_with_one_key_make_one_job(site) -> None:
    kim = site.member("kim", "BCG")
    token = kim_token(site, "kim")

    def submit(_: int) -> int:
        with site_client(site, token) as client:
            return client.submit_request(JobIn(command=["true"]), key="the-same").id

    with ThreadPoolExecutor(20) as pool:
        ids = set(pool.map(submit, range(20)))
    assert len(ids) == 1
    assert len(kim.jobs()) == 1


def lives(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent to take note does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def kim_token(site, user: str) -> str:
    from dure.wire import TokenIn

    return site.admin().new_token(TokenIn(user=user)).secret


def site_client(site, token: str):
    from dure.client import Client

    return Client(url=site.url, token=token)


def test_no_fit_is_refused_with_what_would_fit(site) -> None:
    kim = site.member("kim", "BCG")
    with pytest.raises(ApiError) as refused:
        kim.submit(["true"], gpus=4)
    assert refused.value.status == 422
    assert refused.value.problem.code == "NO_FIT_PLACEMENT"
    assert refused.value.problem.nearest_requests[0]["num_gpus"] == 2


def test_drained_node_waits_with_that_reason_and_goes_on(site) -> None:
    from dure.wire import NodePatch

    kim, admin = site.member("kim", "BCG"), site.admin()
    admin.patch_node("box", NodePatch(drained=True, drain_reason="new cable"))
    job = kim.submit(["true"])
    assert kim.job_out(job.id).state is JobState.NODE_WAIT
    assert kim.why(job.id).reason.code == "NODE_DRAINED"
    admin.patch_node("box", NodePatch(drained=False))
    job.wait(timeout="10s")


def test_drain_force_puts_the_job_back_in_line_uncounted(site) -> None:
    from dure.wire import NodePatch

    kim, admin = site.member("kim", "BCG"), site.admin()
    job = kim.submit([*PY, "import os,time\nif os.environ['JOB_ATTEMPT']=='1': time.sleep(30)"])
    until(lambda: kim.job_out(job.id).state is JobState.RUNNING, "running")
    admin.patch_node("box", NodePatch(drained=True, force=True))
    until(lambda: kim.job_out(job.id).state is JobState.NODE_WAIT, "waits for the node")
    admin.patch_node("box", NodePatch(drained=False))
    job.wait(timeout="10s")
    assert kim.job_out(job.id).retries == 0
    assert site.audit().returncode == 0


def test_a_second_server_on_the_same_port_says_so(site) -> None:
    port = site.url.rsplit(":", 1)[1]
    other = site.state.parent / "other"
    done = subprocess.run(
        [DURE, "server", "--config", site.config, "--port", port, "--state-dir", other],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode != 0
    assert "address already in use" in done.stderr.lower()


def test_a_second_server_on_the_same_state_folder_is_refused(site) -> None:
    done = subprocess.run(
        [DURE, "server", "--config", site.config],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2
    assert "in use by another server" in done.stderr
    assert str(site.server.pid) in done.stderr
    assert site.admin().me().role == "admin"


def test_a_bad_setting_stops_the_start_with_a_sentence(tmp_path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text("[server]\nprot = 8470\n")
    done = subprocess.run(
        [DURE, "server", "--config", config],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2
    assert "prot" in done.stderr
