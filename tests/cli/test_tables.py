from __future__ import annotations

import json
import re

import pytest
from rich.cells import cell_len

from dure import wire
from tests.cli.conftest import Shell
from tests.cli.stub import (
    Refuse,
    Stub,
    done,
    job_out,
    lab_out,
    node_out,
    pool_tier,
    queue_out,
    queue_row,
    why_out,
)

ETA = wire.EtaOut(
    p20_ms=1_700_000_600_000,
    p50_ms=1_700_001_200_000,
    p80_ms=1_700_001_800_000,
    made_ms=1_700_000_000_000,
    text="in about 20m (10m to 30m)",
)


@pytest.fixture(autouse=True)
def lists(server: Stub) -> None:
    server.on(
        "GET /v1/queue", queue_out(queue_row(1, 7, eta=ETA), queue_row(2, 8, user="kim", lab="VIS"))
    )
    tiers = [
        pool_tier("RTX4090", simulated=True),
        pool_tier("RTX3080Ti", idle=0, start_now=0, next_free_ms=1_000_840_000),
    ]
    server.on("GET /v1/pool", wire.PoolOut(as_of_ms=1_000_000_000, tiers=tiers, nodes=[node_out()]))
    server.on("GET /v1/jobs", wire.JobPage(items=[job_out(9), done(8)]))
    server.on("GET /v1/jobs/9", job_out(9))
    server.on("GET /v1/jobs/9/why", why_out(job=9))
    server.on("GET /v1/labs", wire.LabList(items=[lab_out("BCG"), lab_out("VIS", "1")]))
    server.on("GET /v1/nodes", wire.NodeList(items=[node_out()]))


LISTINGS = [
    ("queue",),
    ("pool",),
    ("pool", "--nodes"),
    ("jobs",),
    ("show", "9"),
    ("why", "9"),
    ("usage",),
    ("admin", "lab", "ls"),
    ("admin", "node", "ls"),
]


@pytest.mark.parametrize("args", LISTINGS)
@pytest.mark.parametrize("lang", ["en", "ko"])
def test_a_pipe_gets_tsv_without_ansi(dure: Shell, args: tuple[str, ...], lang: str) -> None:
    dure.env["DURE_LANG"] = lang
    result = dure(*args)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "\t" in result.stdout
    assert result.stdout.splitlines()[0] == result.stdout.splitlines()[0].upper() or args[0] in {
        "show",
        "why",
    }


def test_queue_in_a_pipe(dure: Shell) -> None:
    assert dure("queue").stdout.splitlines() == [
        "RANK\tJOB\tNAME\tLAB\tUSER\tGPU\tWAIT\tEXPECTED\tREASON",
        "1\t7\tjob-7\tBCG\tbcg\t2 ≥24G\t11m\t~20m\tall 4 fitting GPUs are busy",
        "2\t8\tjob-8\tVIS\tkim\t2 ≥24G\t11m\t\tall 4 fitting GPUs are busy",
    ]
    assert len(dure("queue", "--no-header").stdout.splitlines()) == 2
    assert dure("queue", "-q").stdout == "7\n8\n"
    assert dure("queue", "-q", "--lab", "VIS").stdout == "8\n"
    assert dure("queue", "-q", "--mine").stdout == "7\n"


def test_why_tells_when_what_would_help_and_what_moved_it(dure: Shell, server: Stub) -> None:
    hint = wire.HintOut(change="num_gpus", value=1, node="n1", tier="R", text="With 1 GPU: now.")
    moved = wire.RankChangeOut(
        lab="BCG", job=3, at_ms=1, charged_tflop_s="5", own=True, text="It moved back."
    )
    server.on("GET /v1/jobs/12/why", why_out(eta=ETA, sooner=[hint], changes=[moved]))
    told = dure("why", "12").stdout
    for part in ("in about 20m", "With 1 GPU: now.", "It moved back."):
        assert part in told


def test_the_score_of_forecasts(dure: Shell, server: Stub) -> None:
    score = wire.CalibrationOut(scored=10, inside=6, early=1, late=3, inside_share=0.6, days=30)
    server.on("GET /v1/forecasts/calibration", score)
    assert "6 60%" in dure("admin", "forecast", "score").stdout
    assert dure("admin", "forecast", "score", "-q").stdout == "60%\n"


def test_pool_marks_simulated_tiers(dure: Shell) -> None:
    assert dure("pool").stdout.splitlines() == [
        "TIER\tVRAM\tRUN\tRSV\tIDLE\tDOWN\tSTART NOW\tNEXT FREE",
        "RTX4090 (simulated)\t24G\t1\t0\t3\t0\t3 (max 2/job)\tnow",
        "RTX3080Ti\t24G\t1\t0\t0\t0\t—\t1 in 14m",
    ]
    assert dure("pool", "RTX3080Ti", "-q").stdout == "RTX3080Ti\n"


def test_usage_is_told_in_4090_hours_and_tflop_s(dure: Shell, server: Stub) -> None:
    assert dure("usage", "--no-header").stdout.splitlines()[0] == "BCG\t\t2.00\t594,720\t1\t2"
    line = wire.LedgerLine(
        job=9,
        epoch=1,
        kind="run",
        segment=0,
        user="bcg",
        node="n1",
        tier="RTX4090",
        gpus=1,
        from_ms=0,
        to_ms=1,
        cost_tflop_s="297360",
        booked_ms=1,
    )
    account = wire.UsageOut(
        lab="BCG",
        as_of_ms=1,
        usage_tflop_s="297360",
        charged_tflop_s="594720",
        run_tflop_s="446040",
        reserved_tflop_s="148680",
        opening_tflop_s="0",
        lines=[line],
    )
    server.on("GET /v1/labs/BCG/usage", account)
    told = dure("usage", "--lab", "BCG").stdout
    assert "RUN\t1.50 4090-h = 446,040 TFLOP-s" in told
    assert "RESERVED\t0.50 4090-h = 148,680 TFLOP-s" in told
    assert dure("usage", "--lab", "BCG", "--ledger").stdout.splitlines()[1].startswith("9\t1\trun")
    assert dure("usage", "--ledger").exit_code == 2
    # The lines of this account do not add up to what it says was charged.
    assert "THEY DIFFER" in dure("usage", "--lab", "BCG", "--ledger").stderr
    chosen = dure("usage", "--lab", "BCG", "--ledger", "--json", "job,cost_tflop_s").stdout
    assert json.loads(chosen) == [{"job": 9, "cost_tflop_s": "297360"}]


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (("queue",), wire.QueueRow),
        (("queue", "--personal"), wire.PersonalRow),
        (("pool",), wire.PoolTier),
        (("pool", "--nodes"), wire.NodeOut),
        (("jobs",), wire.JobOut),
        (("show", "9"), wire.JobOut),
        (("why", "9"), wire.WhyOut),
        (("usage",), wire.LabOut),
        (("admin", "node", "ls"), wire.NodeOut),
    ],
)
def test_json_has_all_fields_of_its_struct(
    dure: Shell, server: Stub, args: tuple[str, ...], kind: type[wire.Out]
) -> None:
    row = wire.PersonalRow(
        job=1, name="x", num_gpus=1, held=False, reason=wire.ReasonOut(code="HELD", text="t")
    )
    server.on("GET /v1/me/queue", wire.PersonalQueueOut(slots_used=1, slots_limit=2, items=[row]))
    dure.env["DURE_LANG"] = "ko"
    result = dure(*args, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    one = found[0] if isinstance(found, list) else found
    assert list(one) == list(kind.__struct_fields__)
    assert server.seen[-1].headers["accept-language"] == "en"  # JSON is never translated


def test_json_fields_are_chosen_and_checked(dure: Shell, server: Stub) -> None:
    assert json.loads(dure("jobs", "--json", "id,state").stdout) == [
        {"id": 9, "state": "GLOBAL_QUEUE_WAIT"},
        {"id": 8, "state": "COMPLETED"},
    ]
    before = len(server.seen)
    wrong = dure("jobs", "--json", "id,colour")
    assert wrong.exit_code == 2
    assert "colour" in wrong.stderr
    assert "state_text" in wrong.stderr  # the known ones are named
    assert len(server.seen) == before  # nothing was sent
    assert json.loads(dure("show", "--json", "9").stdout)["id"] == 9  # a number is no field


def cells(line: str) -> int:
    return cell_len(line)


def test_hangul_columns_stay_aligned(dure: Shell, server: Stub, terminal: None) -> None:
    names = ["확산모델-실험", "a", "한글 english 섞임"]
    rows = [queue_row(i + 1, i + 7, name=n, lab="비전") for i, n in enumerate(names)]
    server.on("GET /v1/queue", queue_out(*rows))
    dure.env["DURE_LANG"] = "ko"
    lines = dure("queue").stdout.splitlines()
    plain = [
        re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines if "비전" in line or "순위" in line
    ]
    assert len(plain) == 4
    ends = {cells(line[: re.search("연구실|비전", line).start()]) for line in plain}
    assert len(ends) == 1, plain
    assert "순위" in plain[0]


def test_control_characters_of_others_do_not_reach_the_terminal(
    dure: Shell, server: Stub, terminal: None
) -> None:
    server.on("GET /v1/jobs", wire.JobPage(items=[job_out(9, name="\x1b]0;evil\x07\tx\u202e")]))
    dure.env["NO_COLOR"] = "1"
    told = dure("jobs").stdout
    assert "evil" in told
    assert not set(told) & {"\x1b", "\x07", "\t", "\u202e"}


def test_korean_and_english_by_locale(dure: Shell, server: Stub) -> None:
    for name, value, word in [("LANG", "ko_KR.UTF-8", "제출"), ("DURE_LANG", "en", "Submit")]:
        dure.env[name] = value
        assert word in dure("--help").stdout
    dure.env["DURE_LANG"] = "ko"
    assert "작업 취소" in dure("cancel", "--help").stdout
    dure("queue")
    assert server.seen[-1].headers["accept-language"] == "ko"


def test_an_empty_queue_says_so_on_stderr(dure: Shell, server: Stub) -> None:
    server.on("GET /v1/queue", queue_out())
    result = dure("queue", "--no-header")
    assert (result.stdout, result.stderr) == ("", "Nobody is waiting.\n")
    server.on("GET /v1/queue", queue_out(personal=3))
    assert dure("queue").stderr == "Nobody is in the line; jobs in personal queues: 3.\n"


def test_pages_are_followed_to_the_limit(dure: Shell, server: Stub) -> None:
    first = wire.JobPage(items=[job_out(n) for n in range(400, 200, -1)], next="c1")
    second = wire.JobPage(items=[job_out(n) for n in range(200, 150, -1)])
    server.on("GET /v1/jobs", first, second)
    assert len(dure("jobs", "-q", "--limit", "250").stdout.split()) == 250
    asked = server.asked("GET /v1/jobs")
    assert [a.query.get("limit") for a in asked] == [["200"], ["50"]]
    assert asked[1].query["cursor"] == ["c1"]


def test_filters_reach_the_server(dure: Shell, server: Stub) -> None:
    dure(
        "jobs", "--state", "running", "--state", "FAILED", "--lab", "VIS", "--mine", "--since", "2h"
    )
    query = server.seen[-1].query
    assert query["state"] == ["RUNNING", "FAILED"]
    assert query["lab"] == ["VIS"]
    assert query["mine"] == ["true"]
    assert int(query["since_ms"][0]) > 1_700_000_000_000


def test_why_of_an_unknown_job(dure: Shell, server: Stub) -> None:
    server.on("GET /v1/jobs/99/why", Refuse(404, "NOT_FOUND"))
    assert dure("why", "99").exit_code == 3
