from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import string
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from dure import wire
from dure.cli import cli, texts
from dure.cli.exits import exit_of_job
from dure.core.model import JobState, Phase, RetryOn, Role
from tests.cli.conftest import Shell
from tests.cli.stub import (
    TOKEN,
    Drop,
    Refuse,
    Stub,
    done,
    job_out,
    lab_out,
    node_out,
    pool_tier,
    why_out,
)

S = JobState


def body(server: Stub, kind: type[msgspec.Struct]) -> msgspec.Struct:
    return msgspec.json.decode(server.seen[-1].body, type=kind)


# -- exit codes ------------------------------------------------------------------------

REFUSALS = [
    (400, "INVALID_REQUEST", "", 2),
    (401, "UNAUTHENTICATED", "", 4),
    (403, "FORBIDDEN", "", 4),
    (404, "NOT_FOUND", "", 3),
    (409, "WRONG_STATE", "", 2),
    (412, "STALE_EDIT", "", 2),
    (422, "NO_FIT_PLACEMENT", "", 2),
    (428, "PRECONDITION_REQUIRED", "", 2),
    (429, "QUEUE_LIMIT", "", 2),
    (429, "RATE_LIMITED", "3600", 6),
    (500, "INTERNAL", "", 6),
    (502, "HTTP_502", "", 6),
    (503, "STORE_FAILED", "", 6),
    (503, "SERVICE_MAINTENANCE", "", 7),
    (418, "TEAPOT", "", 1),
]


@pytest.mark.parametrize(("status", "code", "after", "want"), REFUSALS)
def test_exit_code_and_words_of_a_refusal(
    dure: Shell, server: Stub, status: int, code: str, after: str, want: int
) -> None:
    server.on("POST /v1/jobs", Refuse(status, code, after))
    result = dure("submit", "--", "true")
    assert result.exit_code == want
    assert result.stdout == ""
    for said in (f"sentence of {code}", "a hint", code, "trace-1"):
        assert said in result.stderr


def test_no_fit_is_answered_with_flags_to_paste(dure: Shell, server: Stub) -> None:
    near = [{"num_gpus": 2, "tier": "RTX 4090", "min_vram_gb": 24.0}]
    server.on("POST /v1/jobs", Refuse(422, "NO_FIT_PLACEMENT", nearest_requests=near))
    assert "-g 2 --vram 24 --tier 'RTX 4090'" in dure("submit", "--", "x").stderr
    wrong = [wire.FieldError(pointer="/name", detail="too long")]
    server.on("POST /v1/jobs", Refuse(422, "INVALID_REQUEST", errors=wrong))
    assert "/name: too long" in dure("submit", "--", "x").stderr


def test_unreachable_unexpected_and_usage(dure: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dure.env["DURE_URL"] = f"http://127.0.0.1:{free.getsockname()[1]}"
        result = dure("pool")
    assert result.exit_code == 6
    assert dure.env["DURE_URL"] in result.stderr
    dure.env["DURE_URL"] = "ftp://x"
    assert dure("pool").exit_code == 2
    monkeypatch.setattr("dure.client.Client.pool", lambda _: 1 / 0)
    dure.env["DURE_URL"] = dure.server.url
    broken = dure("pool")
    assert broken.exit_code == 1
    assert "Traceback" not in broken.stderr
    assert "Traceback" in dure("-v", "pool").stderr
    assert dure("poool").exit_code == 2
    assert "Did you mean pool?" in dure("poool").stderr


ENDINGS = [
    (S.COMPLETED, None, 0),
    (S.FAILED, "EXIT_NONZERO", 10),
    (S.CANCELLED, None, 11),
    (S.FAILED, "OOM_NO_LARGER_TIER", 12),
    (S.TIMED_OUT, "TIME_LIMIT", 13),
    (S.DEAD, "POISON_SUSPECTED", 14),
]


def ended(state: JobState, code: str | None, exit_code: int = 0) -> wire.JobOut:
    error = wire.ErrorOut(code=code, text=f"text of {code}") if code else None
    return done(state=state, error=error, exit_code=exit_code)


@pytest.mark.parametrize(("state", "code", "want"), ENDINGS)
def test_wait_and_run_exit_with_how_the_job_ended(
    dure: Shell, server: Stub, state: JobState, code: str | None, want: int
) -> None:
    server.on("GET /v1/jobs/12", job_out(), ended(state, code))
    server.on("GET /v1/jobs/12/why", why_out())
    result = dure("wait", "12")
    assert result.exit_code == want
    assert code is None or f"text of {code}" in result.stderr
    server.on("POST /v1/jobs", job_out())
    server.on("GET /v1/jobs/12", job_out(), ended(state, code, 77))
    server.on("GET /v1/jobs/12/logs", b"")
    assert dure("run", "--", "x").exit_code == want
    server.on("GET /v1/jobs/12", ended(state, code, 77))
    assert dure("run", "--exit", "job", "--", "x").exit_code == 77
    assert exit_of_job(job_out()) == 8


def test_wait_gives_up_with_8(dure: Shell, server: Stub) -> None:
    server.on("GET /v1/jobs/12", job_out())
    result = dure("wait", "12", "--timeout", "0s")
    assert (result.exit_code, result.stderr) == (8, "job 12 is still: Waiting\n")
    assert dure("wait", "12", "--timeout", "4").exit_code == 2


# -- submit and run --------------------------------------------------------------------


def test_submit_turns_flags_into_the_request(
    dure: Shell, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.on("POST /v1/jobs", job_out(41))
    monkeypatch.setenv("HERE", "now")
    result = dure(
        *[
            "submit",
            "-g",
            "2",
            "--vram",
            "24G",
            "--tier",
            "A",
            "--tier",
            "B",
            "-t",
            "1h30m",
            "-n",
            "vit",
            "--node",
            "n1",
            "--retry",
            "3",
        ],
        *[
            "--retry-on",
            "error",
            "--no-oom-escalate",
            "--idempotent",
            "--signal",
            "USR1@5m",
            "--lab",
            "VIS",
        ],
        *[
            "--not-before",
            "+2h",
            "--label",
            "k=v",
            "--hold",
            "--workdir",
            "/data",
            "--key",
            "K1",
            "--env",
            "A=b=c",
        ],
        *["--env", "HERE", "--", "python", "-m", "train", "--lr", "3", "--json"],
    )
    assert (result.exit_code, result.stdout) == (0, "41\n")
    assert "job 41 submitted" in result.stderr
    sent = body(server, wire.JobIn)
    assert sent.not_before_ms > time.time() * 1000
    assert msgspec.structs.replace(sent, not_before_ms=0) == wire.JobIn(
        command=["python", "-m", "train", "--lr", "3", "--json"],
        name="vit",
        lab="VIS",
        env={"A": "b=c", "HERE": "now"},
        num_gpus=2,
        tiers=["A", "B"],
        min_vram_gb=24,
        node="n1",
        time_limit_s=5400,
        retry=wire.RetryIn(max=3, on=RetryOn.ERROR),
        oom_escalate=False,
        idempotent=True,
        pre_stop_signal=wire.PreStopSignalIn(signal="USR1", before_s=300),
        workdir="/data",
        labels={"k": "v"},
        hold=True,
    )
    assert server.seen[-1].headers["idempotency-key"] == "K1"


def test_submit_of_files(
    dure: Shell, server: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server.on("POST /v1/jobs", job_out(41))
    Path("a.py").write_text("print()")
    Path("b.sh").write_text("#!/bin/bash\n#SBATCH -G 2\n  #SBATCH -t 10\necho")
    Path("c").write_text("#!/bin/sh\n")
    Path("c").chmod(0o755)
    for args, command in [
        (("a.py", "--lr", "1"), ["python3", "a.py", "--lr", "1"]),
        (("b.sh",), ["bash", "b.sh"]),
        (("c", "--", "x"), ["./c", "--", "x"]),
        (("--workdir", "/", "a.py"), ["python3", str(tmp_path / "a.py")]),
    ]:
        result = dure("submit", "--parsable", *args)
        assert result.stdout == "41\n"
        assert ("2 #SBATCH lines of b.sh" in result.stderr) == ("b.sh" in args)
        sent = body(server, wire.JobIn)
        assert sent.command == command
        if "/" not in args:
            assert sent.workdir == str(tmp_path)
    assert body(server, wire.JobIn).name == "a.py"
    missing = dure("submit", "nothing.py")
    assert missing.exit_code == 2
    assert "dure submit -- nothing.py" in missing.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["submit"],
        ["run", "-t", "4", "--", "x"],
        ["run", "-g", "9", "--", "x"],
        ["run", "--env", "NOT_SET_HERE", "--", "x"],
        ["run", "--label", "x", "--", "x"],
        ["run", "--signal", "KILL@1m", "--", "x"],
        ["run", "--vram", "lots", "--", "x"],
        ["edit", "12"],
        ["edit", "12", "-t", "soon"],
        ["jobs", "--state", "HAPPY"],
        ["jobs", "--since", "once"],
        ["api", "GET", "v1/me"],
        ["api", "POST", "/v1/jobs", "-d", "{"],
        ["cancel", "15-12"],
        ["cancel", "1-5000"],
        ["show", "1-2"],
        ["admin", "tier", "set", "new"],
        ["admin", "lab", "set", "BCG", "--slots", "many"],
    ],
)
def test_usage_errors_write_nothing(dure: Shell, server: Stub, args: list[str]) -> None:
    result = dure(*args)
    assert result.exit_code == 2, result.output
    assert [s for s in server.seen if s.method != "GET"] == []


def test_dry_run_previews(dure: Shell, server: Stub) -> None:
    note = wire.PlacementNoteOut(
        node="n1", tier="RTX4090", idle=2, capacity=4, in_service=True, fits=True
    )
    seen = wire.PreviewOut(
        fits=[note],
        starts_now=True,
        ahead=0,
        slots_used=1,
        slots_limit=3,
        cost_per_hour_tflop_s={"RTX4090": "297360"},
        lab_usage_tflop_s="0",
    )
    server.on("POST /v1/submit/preview", seen)
    told = dure("submit", "--dry-run", "--", "x")
    assert "COST PER HOUR\tRTX4090 1.00 4090-h" in told.stdout
    assert "It would start now." in told.stderr
    chosen = dure("submit", "--dry-run", "--json", "starts_now,ahead", "--", "x").stdout
    assert json.loads(chosen) == {"starts_now": True, "ahead": 0}
    assert server.asked("POST /v1/jobs") == []


def test_run_says_why_it_waits_then_shows_the_output(dure: Shell, server: Stub) -> None:
    running = done(state=S.RUNNING, ended_ms=None, exit_code=None)
    server.on("POST /v1/jobs", job_out())
    server.on("GET /v1/jobs/12", *[job_out()] * 3, running, done())
    server.on("GET /v1/jobs/12/why", why_out(), why_out(), why_out(rank=1))
    log = b"epoch 1\xff\n"

    def answer(seen: object) -> bytes:
        return log[int(seen.query.get("offset", ["0"])[0]) :]

    server.on("GET /v1/jobs/12/logs", answer)
    result = dure("run", "--", "x")
    assert result.exit_code == 0
    assert result.stdout_bytes == log
    assert result.stderr.splitlines() == [
        "✓ job 12 submitted   train · 1",
        "● job 12 waits, rank 3   2 jobs stand before it",
        "● job 12 waits, rank 1   2 jobs stand before it",
        "✓ job 12: Done after 1m",
    ]


def test_run_detached(dure: Shell, server: Stub) -> None:
    server.on("POST /v1/jobs", job_out())
    result = dure("run", "-d", "--", "x")
    assert (result.exit_code, result.stdout) == (0, "12\n")
    assert len(server.seen) == 1


@pytest.mark.parametrize("cancels", [False, True])
def test_ctrl_c_leaves_the_view(server: Stub, cancels: bool) -> None:
    server.on("POST /v1/jobs", job_out())
    server.on("GET /v1/jobs/12", job_out())
    server.on("GET /v1/jobs/12/why", why_out())
    server.on("POST /v1/jobs/12/cancel", job_out(state=S.CANCELLED))
    flags = ["--cancel-on-exit"] if cancels else []
    # A test run in the background has inherited "ignore Ctrl-C"; a terminal's has not.
    fresh = ["env", "--default-signal=INT", sys.executable, "-c", "from dure.cli import cli; cli()"]
    process = subprocess.Popen(
        [*fresh, "run", *flags, "--", "x"],
        env={**os.environ, "DURE_URL": server.url, "DURE_TOKEN": TOKEN},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "rank 3" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert ("dure logs -f 12" in said) is not cancels
    assert len(server.asked("POST /v1/jobs/12/cancel")) == cancels


def test_a_job_outlives_a_lost_server(
    dure: Shell, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dure.client.logs.PATIENCE_S", 0.0)
    server.on("POST /v1/jobs", job_out())
    server.on("GET /v1/jobs/12", Refuse(403, "FORBIDDEN"))
    result = dure("run", "--", "x")
    assert result.exit_code == 4
    assert "Job 12 was submitted and goes on." in result.stderr


# -- looking at output -----------------------------------------------------------------


def test_logs_are_bytes_as_they_were(dure: Shell, server: Stub) -> None:
    log = "50%\r100%\x1b[0m 끝\n".encode()

    def answer(seen: object) -> bytes:
        return log[int(seen.query.get("offset", ["0"])[0]) :]

    server.on("GET /v1/jobs/12/logs", answer)
    assert dure("logs", "12").stdout_bytes == log
    server.on("GET /v1/jobs/12/logs", b"last\n", b"")
    assert dure("logs", "12", "--tail", "1", "--attempt", "2").stdout == "last\n"
    assert server.seen[-2].query == {"tail": ["1"], "attempt": ["2"]}


# -- control ---------------------------------------------------------------------------


def test_one_cancel_asks_nothing_and_tells_the_clocks(dure: Shell, server: Stub) -> None:
    clocks = wire.CancelOut(asked_ms=0, checkpoint_until_ms=30_000, kill_at_ms=60_000)
    server.on("POST /v1/jobs/12/cancel", job_out(state=S.CANCELLING, cancel=clocks))
    result = dure("cancel", "12")
    assert result.exit_code == 0
    assert "may save until" in result.stderr


def test_cancel_of_several_needs_yes_without_a_terminal(
    dure: Shell, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in (12, 13, 14):
        server.on(f"POST /v1/jobs/{n}/cancel", job_out(n, state=S.CANCELLED))
    server.on("POST /v1/jobs/13/cancel", Refuse(409, "ALREADY_ENDED"))
    refused = dure("cancel", "12-14")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert server.seen == []
    result = dure("cancel", "12-14", "13", "--yes", "--json", "id")
    assert result.exit_code == 2  # one was refused, the others were cancelled
    assert json.loads(result.stdout) == [{"id": 12}, {"id": 14}]
    monkeypatch.setattr("dure.cli.app.can_ask", lambda: True)
    before = len(server.seen)
    assert dure("cancel", "12", "14", input="n\n").exit_code == 1
    assert len(server.seen) == before
    assert dure("cancel", "12", "14", input="y\n").exit_code == 0


def test_references(dure: Shell, server: Stub) -> None:
    page = wire.JobPage(items=[job_out(9, name="vit"), job_out(7, name="vit-2")])
    server.on("GET /v1/jobs", page)
    server.on("POST /v1/jobs/9/hold", job_out(9, held=True))
    assert dure("hold", "@last").exit_code == 0
    assert server.asked("GET /v1/jobs")[-1].query["mine"] == ["true"]
    assert dure("hold", "vit", "9", "@last").exit_code == 0
    assert len(server.asked("POST /v1/jobs/9/hold")) == 2  # each job once a call
    server.on("GET /v1/jobs", wire.JobPage(items=[]))
    assert dure("hold", "nobody").exit_code == 3
    assert dure("hold", "@last").exit_code == 3


def test_retry_rerun_release_edit(dure: Shell, server: Stub) -> None:
    for verb in ("retry", "release"):
        server.on(f"POST /v1/jobs/12/{verb}", job_out())
        assert dure(verb, "12").exit_code == 0
    server.on("POST /v1/jobs/12/rerun", Drop(), job_out(20))
    result = dure("rerun", "12", "--parsable")
    assert (result.stdout, result.stderr) == ("20\n", "")
    assert len({s.headers["idempotency-key"] for s in server.asked("POST /v1/jobs/12/rerun")}) == 1
    server.on("PATCH /v1/jobs/12", job_out())
    args = ["edit", "12", "-t", "none", "--tier", "any", "--node", "any", "--not-before", "now"]
    assert dure(*args, "-g", "2").exit_code == 0
    assert json.loads(server.seen[-1].body) == {
        "time_limit_s": None,
        "tiers": [],
        "node": None,
        "not_before_ms": 0,
        "num_gpus": 2,
    }


# -- signing in, raw, completion -------------------------------------------------------


def test_login_checks_and_saves_privately(dure: Shell, server: Stub, tmp_path: Path) -> None:
    dure.env = {"XDG_CONFIG_HOME": str(tmp_path)}
    result = dure("login", "--url", server.url, "--token-stdin", input=f"{TOKEN}\n")
    assert result.exit_code == 0, result.output
    where = tmp_path / "dure" / "config.toml"
    assert stat.S_IMODE(where.stat().st_mode) == 0o600
    assert TOKEN in where.read_text()
    assert dure("queue", "--mine").exit_code == 3  # signed in: the stub has no queue
    assert server.seen[-2].headers["authorization"] == f"Bearer {TOKEN}"
    where.chmod(0o644)
    assert "chmod 600" in dure("pool").stderr
    where.write_text("")
    server.on("GET /v1/me", Refuse(401, "UNAUTHENTICATED"))
    wrong = dure("login", "--url", server.url, "--token-stdin", input="dure_pat_x\n")
    assert wrong.exit_code == 4
    assert where.read_text() == ""
    assert dure("login", "--url", server.url).exit_code == 2  # nobody to ask


def test_verbose_shows_requests_but_no_token(dure: Shell, server: Stub) -> None:
    server.on("GET /v1/labs", wire.LabList(items=[]))
    result = dure("-v", "usage")
    assert "> GET /v1/labs 200" in result.stderr
    assert TOKEN not in result.output


def test_raw_api(dure: Shell, server: Stub, tmp_path: Path) -> None:
    result = dure("api", "get", "/v1/me", "-i")
    assert json.loads(result.stdout)["user"] == "bcg"
    assert "etag" in result.stderr
    server.on("PUT /v1/labs/BCG", lab_out("BCG"))
    (tmp_path / "b.json").write_text('{"weight": 2}')
    args = ["api", "PUT", "/v1/labs/BCG", "--if-match", '"e"', "-d", f"@{tmp_path / 'b.json'}"]
    assert dure(*args).exit_code == 0
    assert server.seen[-1].headers["if-match"] == '"e"'
    assert server.seen[-1].body == b'{"weight": 2}'


def test_open_prints_the_address(dure: Shell, server: Stub) -> None:
    assert dure("open", "12").stdout == f"{server.url}/jobs/12\n"
    assert dure("open").stdout == f"{server.url}/pool\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(dure: Shell, shell: str) -> None:
    result = dure("completion", shell)
    assert result.exit_code == 0
    assert "_DURE_COMPLETE" in result.stdout


def test_completion_asks_for_ids_and_tiers(dure: Shell, server: Stub) -> None:
    from click.shell_completion import ShellComplete

    def offered(*args: str, incomplete: str = "") -> list[str]:
        complete = ShellComplete(cli, {}, "dure", "_DURE_COMPLETE")
        root = ["--url", server.url]
        return [i.value for i in complete.get_completions([*root, *args], incomplete)]

    server.on("GET /v1/jobs", wire.JobPage(items=[job_out(412), job_out(37)]))
    assert offered("cancel", incomplete="4") == ["412"]
    tier = wire.TierOut(
        name="RTX4090", vram_gb=24, tflops=82.6, sort_order=1, max_gpus=8, active=True
    )
    server.on("GET /v1/tiers", wire.TierList(items=[tier]))
    assert offered("run", "--tier") == ["RTX4090"]
    server.on("GET /v1/tiers", Refuse(401, "UNAUTHENTICATED"))
    assert offered("run", "--tier") == []
    assert "queue" in offered(incomplete="qu")


# -- administration --------------------------------------------------------------------


def test_admin_changes_only_what_is_given(dure: Shell, server: Stub) -> None:
    tier = wire.TierOut(name="A", vram_gb=24, tflops=82.6, sort_order=5, max_gpus=2, active=True)
    server.on("GET /v1/tiers/A", tier)
    server.on("PUT /v1/tiers/A", tier)
    assert dure("admin", "tier", "set", "A", "--max-gpus", "4", "--inactive").exit_code == 0
    want = wire.TierIn(vram_gb=24, tflops=82.6, sort_order=5, max_gpus=4, active=False)
    assert body(server, wire.TierIn) == want
    assert server.seen[-1].headers["if-match"] == '"e1-x"'
    server.on("GET /v1/labs/BCG", lab_out("BCG", weight=3.0, limits=wire.LimitsIn(slots=2)))
    server.on("PUT /v1/labs/BCG", lab_out("BCG"))
    assert dure("admin", "lab", "set", "BCG", "--max-time", "2d").exit_code == 0
    assert body(server, wire.LabIn) == wire.LabIn(
        weight=3.0, limits=wire.LimitsIn(slots=2, max_time_limit_s=172_800)
    )
    dure("admin", "lab", "set", "BCG", "--slots", "none")
    assert body(server, wire.LabIn).limits == wire.LimitsIn()
    made = wire.UserOut(
        name="kim",
        lab="VIS",
        role=Role.MEMBER,
        active=True,
        limits=wire.LimitsIn(),
        slots_used=0,
        slots_limit=2,
    )
    server.on("PUT /v1/users/kim", made)
    assert dure("admin", "user", "set", "kim").exit_code == 2
    assert dure("admin", "user", "set", "kim", "--lab", "VIS").exit_code == 0
    assert "if-match" not in server.seen[-1].headers


def test_admin_nodes_and_maintenance(dure: Shell, server: Stub) -> None:
    server.on("GET /v1/nodes/n1", node_out())
    server.on("PATCH /v1/nodes/n1", node_out(drained=True))
    assert dure("admin", "node", "drain", "n1", "--reason", "fan").exit_code == 0
    assert body(server, wire.NodePatch) == wire.NodePatch(drained=True, drain_reason="fan")
    before = len(server.seen)
    assert dure("admin", "node", "drain", "n1", "--force").exit_code == 2
    assert len(server.seen) == before
    assert dure("admin", "node", "drain", "n1", "--force", "--yes").exit_code == 0
    assert body(server, wire.NodePatch).force
    server.on("PUT /v1/maintenance", wire.MaintenanceOut(phase=Phase.DRAINING))
    server.on("GET /v1/maintenance/status", wire.MaintenanceOut(phase=Phase.DRAINING))
    assert "DRAINING" in dure("admin", "maintenance", "start").stderr
    assert dure("admin", "maintenance", "status", "-q").stdout == "DRAINING\n"


def test_admin_tokens_and_removal(dure: Shell, server: Stub) -> None:
    made = wire.TokenOut(
        id="abcdef12",
        user="bcg",
        label="ci",
        created_ms=1,
        expires_ms=2,
        last_used_ms=0,
        secret="dure_pat_NEW",
    )
    server.on("POST /v1/tokens", made)
    assert dure("admin", "token", "new", "--label", "ci").stdout == "dure_pat_NEW\n"
    server.on("DELETE /v1/tokens/abcdef12", None)
    assert dure("admin", "token", "rm", "abcdef12").exit_code == 2
    assert dure("admin", "token", "rm", "abcdef12", "-y").exit_code == 0
    server.on("GET /v1/tiers/A", pool_tier("A"))
    server.on("DELETE /v1/tiers/A", None)
    assert dure("admin", "tier", "rm", "A", "-y").exit_code == 0
    assert server.seen[-1].headers["if-match"] == '"e1-x"'


# -- words and start-up ----------------------------------------------------------------


def test_every_text_has_both_languages_and_the_same_fields() -> None:
    def fields(text: str) -> set[str]:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}

    for table in (texts.COMMANDS, texts.SECTIONS, texts.HEADERS, texts.SENTENCES):
        for key, (en, ko) in table.items():
            assert en, key
            assert ko, key
            assert fields(en) == fields(ko), key
    source = "".join(p.read_text() for p in Path(texts.__file__).parent.rglob("*.py"))
    unused = [k for k in texts.SENTENCES if not re.search(rf"""['"]{k}['"](?!: \()""", source)]
    assert unused == []


def test_help_imports_no_command_and_every_command_has_help(dure: Shell) -> None:
    script = (
        "import sys; from dure.cli import cli; cli(['--help'], standalone_mode=False); "
        "bad = [m for m in sys.modules if m in {'rich', 'http.client', 'sqlalchemy', 'litestar'}"
        " or m in {'dure.cli.jobs', 'dure.cli.submit', 'dure.cli.admin.root'}]; "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
    for name in cli.lazy:
        assert dure(name, "--help").exit_code == 0, name
    assert dure("admin", "tier", "set", "--help").exit_code == 0


def test_wiring_can_add_a_lazy_command(dure: Shell) -> None:
    try:
        cli.add_lazy("extra", "tests.cli.extra:extra", ("An extra", "추가"), section="server")
        assert "An extra" in dure("--help").stdout
        assert dure("extra").stdout == "extra ran\n"
    finally:
        del cli.lazy["extra"]
