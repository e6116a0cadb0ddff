"""`dure simulate` as people call it: tables, JSON, CSV, the report, refusals, Ctrl-C."""

from __future__ import annotations

import csv
import json
import os
import pty
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from dure.sim.series import BINS, binned
from dure.sim.svg import ticks
from dure.sim.texts import COLUMNS
from dure.wiring.simulate import simulate
from tests.sim.traces import CLUSTER

ARGUMENTS = ["--cluster", str(CLUSTER), "--generate", "60", "--policy", "classic"]
FIXED = {
    "mean_wait_h", "wait_8gpu_h", "p95_wait_h", "jain", "jain_6h", "starvation_h",
    "queue_empty_d", "utilisation", "reservations_broken_share", "seconds",
}  # fmt: skip
EVIL = '<script>alert("1")</script>&\'x'


def call(*arguments: str, env: dict[str, str] | None = None):
    return CliRunner().invoke(simulate, arguments, env=env)


def test_tables_of_all_columns_and_of_gpu_counts() -> None:
    told = call(*ARGUMENTS, "--policy", "fifo")
    assert told.exit_code == 0, told.output
    lines = [line.split("\t") for line in told.stdout.splitlines()]
    assert lines[0] == ["", "classic", "fifo"]
    assert [line[0] for line in lines[1 : len(COLUMNS) + 1]] == [c.name[0] for c in COLUMNS]
    waits = lines[len(COLUMNS) + 2 :]
    assert waits[0] == ["Policy", "GPUs", "Jobs", "Mean, h", "Median, h", "95 %, h", "Longest, h"]
    assert sum(int(w[2]) for w in waits[1:] if w[0] == "fifo") == 60


def test_json_has_the_promised_keys_and_their_spread() -> None:
    told = call(*ARGUMENTS, "--json")
    found = json.loads(told.stdout)
    assert set(found["policies"]["classic"]) >= FIXED
    assert not [k for k in found["policies"]["classic"] if k.endswith("_sd")]
    busy = ["--cluster", str(CLUSTER), "--generate", "400", "--jitter", "3", "--json"]
    many = json.loads(call(*busy).stdout)["policies"]["classic"]
    assert set(many) >= FIXED | {f"{k}_sd" for k in FIXED}
    assert many["mean_wait_h_sd"] > 0
    assert "±" in call(*ARGUMENTS, "--jitter", "3").stdout


def test_csv_has_a_line_for_each_job_and_each_policy(tmp_path: Path) -> None:
    told = call(*ARGUMENTS, "--policy", "balanced", "--csv", str(tmp_path / "out"), "--json")
    assert told.exit_code == 0, told.output
    with (tmp_path / "out" / "jobs.csv").open(newline="") as file:
        jobs = list(csv.DictReader(file))
    assert len(jobs) == 120
    assert list(jobs[0]) == [
        "policy", "name", "lab", "user", "gpus", "submit_s", "start_s", "end_s", "tier",
    ]  # fmt: skip
    waits = [float(j["start_s"]) - float(j["submit_s"]) for j in jobs if j["policy"] == "classic"]
    assert min(waits) >= 0
    with (tmp_path / "out" / "summary.csv").open(newline="") as file:
        rows = {r["policy"]: r for r in csv.DictReader(file)}
    mean_h = json.loads(told.stdout)["policies"]["classic"]["mean_wait_h"]
    assert float(rows["classic"]["mean_wait_h"]) == mean_h
    assert mean_h == pytest.approx(sum(waits) / len(waits) / 3600, abs=1e-3)


class Outline(HTMLParser):
    """Tags that are open, texts, and everything that could load or run something."""

    VOID = {"meta"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[str] = []
        self.fetches: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.fetches += [k for k, v in attrs if k in {"src", "href", "onload", "xlink:href"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def outline(path: Path) -> Outline:
    page = Outline()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


def evil_trace(folder: Path) -> Path:
    path = folder / "t.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["job_id", "lab", "user", "submit_s", "duration_s", "num_gpus", "gpu_model"])
        for n in range(40):
            lab = EVIL if n % 3 else f"lab{n}"
            out.writerow([f"j{n}", lab, "u", n * 10, 3000, 1 + n % 2, ""])
    return path


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_the_report_stands_alone_and_escapes_what_others_wrote(tmp_path: Path, lang: str) -> None:
    trace, out = evil_trace(tmp_path), tmp_path / "out.html"
    told = call(
        "--trace", str(trace), "--cluster", str(CLUSTER), "--policy", "classic", "--policy",
        "fifo-strict", "--lang", lang, "--report", str(out),
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    page = outline(out)
    assert page.fetches == []
    assert not {"script", "img", "link", "iframe", "object"} & set(page.seen)
    assert "http" not in out.read_text().replace("http-equiv", "")
    assert EVIL in page.texts
    assert {"classic", "fifo-strict"} <= set(page.texts)
    # Two charts of all policies, two of each policy, and the marks of both legends.
    assert page.seen.count("figure") == 6
    assert page.seen.count("polyline") == 4
    title = {"en": "Policy comparison", "ko": "정책 비교"}[lang]
    assert title in page.texts
    assert f"dure simulate --trace {trace}" in "".join(page.texts)
    names = {c.name[lang == "ko"] for c in COLUMNS}
    assert names <= set(page.texts)


def test_the_report_speaks_the_readers_language(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    call(*ARGUMENTS, "--report", str(out), env={"DURE_LANG": "ko"})
    assert '<html lang="ko">' in out.read_text()


def test_the_engine_is_checked_and_knows_no_yardsticks() -> None:
    told = call(*ARGUMENTS, "--engine", "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["violations"] == {"classic": []}
    refused = call(*ARGUMENTS, "--policy", "fifo", "--engine")
    assert refused.exit_code == 2
    assert "NOT_IN_ENGINE" in refused.stderr


def test_a_broken_invariant_is_told_and_fails_the_command(monkeypatch) -> None:
    from dure.core.invariants import Violation

    bad = [Violation(invariant="I1", detail="GPU 0 twice")]
    monkeypatch.setattr("dure.sim.whole.check_world", lambda _: bad)
    told = call(*ARGUMENTS, "--engine")
    assert told.exit_code == 1
    assert "Broken invariant under classic: I1: GPU 0 twice" in told.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--trace", "no/such.csv"], "UNREADABLE_FILE", "no/such.csv"),
        (["--generate", "9", "--policy", "no-such"], "UNKNOWN_POLICY", "fifo-strict"),
        (["--generate", "9", "--report", "no/such/dir/x.html"], "UNWRITABLE_FILE", "no/such"),
    ],
)
@pytest.mark.parametrize("lang", ["en", "ko"])
def test_refusals_have_a_code_a_sentence_and_what_to_do(arguments, code, words, lang) -> None:
    told = call("--cluster", str(CLUSTER), *arguments, "--lang", lang)
    assert told.exit_code == 2
    lines = told.stderr.splitlines()
    assert (lines[2].strip(), len(lines)) == (code, 3)
    assert words in told.stderr
    assert ("습니다" in told.stderr) == (lang == "ko")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "Expecting"),
        ("[]", "list"),
        ('{"tiers": []}', "node_groups"),
        ('{"tiers": [], "node_groups": [{"tier": "x", "gpus": 1, "count": 1}]}', "x"),
    ],
)
def test_a_bad_cluster_is_told_in_words(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    told = call("--generate", "5", "--cluster", str(path))
    assert told.exit_code == 2
    assert "BAD_CLUSTER" in told.stderr
    assert problem in told.stderr


def test_a_cluster_on_which_nothing_fits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    raw = json.loads(CLUSTER.read_text())
    raw["node_groups"] = []
    path.write_text(json.dumps(raw))
    told = call("--generate", "5", "--cluster", str(path))
    assert told.exit_code == 2
    assert "NOTHING_FITS" in told.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--generate", "5"],
        ["--generate", "5", "--trace", "x", "--cluster", "y"],
        ["--generate", "5", "--cluster", "y", "--add-nodes", "T:8x2"],
        ["--from-history", "30d", "--cluster", "y"],
        ["--from-history", "30"],
        ["--from-history", "30d", "--add-nodes", "T:8"],
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str]) -> None:
    told = call(*arguments)
    assert told.exit_code == 2
    assert "Error" in told.stderr


def test_ctrl_c_in_a_terminal_shows_progress_and_no_traceback() -> None:
    # A test run in the background ignores SIGINT, and children inherit that.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from dure.wiring import main; main()"
    )
    arguments = ["simulate", "--cluster", str(CLUSTER), "--generate", "60000"]
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        start_new_session=True,
    )
    os.close(slave)
    seen = b""
    until = time.monotonic() + 15
    while b"/60000" not in seen and time.monotonic() < until:
        seen += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    while True:
        try:
            more = os.read(master, 4096)
        except OSError:
            break
        if not more:
            break
        seen += more
    os.close(master)
    assert process.wait(15) == 130
    assert b"/60000" in seen
    assert b"/s" in seen
    assert b"Traceback" not in seen


# -- what charts are made of --


def test_time_bins_hold_the_mean_height() -> None:
    until_s = float(BINS)
    assert binned([(0, until_s, 3)], until_s) == [3.0] * BINS
    found = binned([(0.5, 2.25, 4), (1.0, 1.5, 2), (until_s - 1, until_s + 9, 1)], until_s)
    assert found[:4] == [2.0, 5.0, 1.0, 0.0]
    assert found[-1] == 1.0
    assert sum(binned([(-5, -1, 7), (until_s + 1, until_s + 2, 7)], until_s)) == 0


def test_ticks_are_round_and_inside() -> None:
    assert ticks(312, 4) == [0, 100, 200, 300]
    assert ticks(0.7, 5) == pytest.approx([0, 0.2, 0.4, 0.6])
    assert ticks(5, 5) == [0, 1, 2, 3, 4, 5]
    assert ticks(0, 5) == [0]
