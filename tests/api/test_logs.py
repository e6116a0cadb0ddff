"""A job's output: windows, last lines, and following it over attempts, with real files."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from dure.adapters.compute.simulated import SimRun
from dure.api import logs
from dure.core.model import Evidence
from dure.engine import admin
from dure.settings import LimitsSettings
from tests.api.site import Site, problem, site

TEXT = b"".join(b"line %d\n" % i for i in range(10))


def write(here: Site, job: int, epoch: int, text: bytes) -> Path:
    assert here.logs is not None
    path = here.logs / f"{job}.{epoch}"
    with path.open("ab") as file:
        file.write(text)
    return path


def read(here: Site, job: int, query: str = "", who: str = "bcg") -> httpx.Response:
    answer = here.ask(who, "GET", f"/v1/jobs/{job}/logs{query and '?' + query}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    return answer


def test_a_job_without_output_has_an_empty_text(here: Site) -> None:
    waiting = here.submit(hold=True)
    answer = read(here, waiting)
    assert (answer.content, answer.headers["dure-log-epoch"]) == (b"", "0")
    assert answer.headers["dure-log-next-offset"] == "0"
    assert read(here, here.submit()).content == b""


def test_windows(here: Site) -> None:
    job = here.submit()
    write(here, job, 1, TEXT)
    whole = read(here, job)
    assert whole.content == TEXT
    assert whole.headers["dure-log-next-offset"] == str(len(TEXT))
    assert whole.headers["dure-log-epoch"] == "1"
    assert read(here, job, "offset=7").content == TEXT[7:]
    beyond = read(here, job, "offset=9999999999")
    assert (beyond.content, beyond.headers["dure-log-next-offset"]) == (b"", str(len(TEXT)))


@pytest.mark.parametrize("piece", [1, 3, 8, 64, 65_536])
@pytest.mark.parametrize("end", [b"", b"\n", b"rest"])
def test_last_lines(here: Site, piece: int, end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "PIECE", piece)
    job = here.submit()
    text = TEXT + end
    write(here, job, 1, text)
    lines = text.splitlines(keepends=True)
    for tail in (0, 1, 2, 9, 10, 11, 12, 1000):
        assert read(here, job, f"tail={tail}").content == b"".join(
            lines[len(lines) - tail if tail < len(lines) else 0 :]
        )
    assert read(here, job, "tail=100&offset=8").content == text[8:]
    assert read(here, job, "tail=0").headers["dure-log-next-offset"] == str(len(text))


def test_an_answer_has_a_most(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "WINDOW", 10)
    job = here.submit()
    write(here, job, 1, TEXT)
    got, offset = b"", 0
    while piece := read(here, job, f"offset={offset}"):
        if not piece.content:
            break
        got += piece.content
        offset = int(piece.headers["dure-log-next-offset"])
    assert got == TEXT


def test_any_bytes(here: Site) -> None:
    job = here.submit()
    noise = bytes(range(256)) * 1000
    write(here, job, 1, noise)
    assert read(here, job).content == noise


def test_bad_questions(here: Site) -> None:
    job = here.submit()
    for query in ("offset=-1", "tail=x", "attempt=0", "tail=100001", "follow=perhaps", "zz=1"):
        problem(here.ask("bcg", "GET", f"/v1/jobs/{job}/logs?{query}"), "INVALID_REQUEST", 422)
    problem(here.ask("bcg", "GET", f"/v1/jobs/{job}/logs?attempt=2"), "NOT_FOUND", 404)


@contextmanager
def following(here: Site, job: int, query: str = "") -> Iterator[Future[httpx.Response]]:
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(read, here, job, f"follow=true{query}")
        time.sleep(0.3)
        yield future


def test_follow_to_the_end(here: Site) -> None:
    here.runs["train"] = SimRun(run_ms=10_000)
    job = here.submit()
    write(here, job, 1, b"first\n")
    with following(here, job) as future:
        write(here, job, 1, b"second\n")
        time.sleep(0.3)
        assert not future.done()
        write(here, job, 1, b"last words\n")
        here.story.wait(11)
        assert future.result(5).content == b"first\nsecond\nlast words\n"
    assert read(here, job, "follow=true&tail=1").content == b"last words\n"
    assert read(here, job, "follow=true&offset=6").content == b"second\nlast words\n"


def test_follow_goes_on_with_the_next_attempt(here: Site) -> None:
    here.runs["train"] = SimRun(run_ms=10_000, evidence=Evidence(exit_code=1))
    job = here.submit(retry={"max": 1, "on": "error"})
    write(here, job, 1, b"one\n")
    with following(here, job) as spanning, following(here, job, "&attempt=1") as only:
        here.story.wait(11)
        assert only.result(5).content == b"one\n"
        time.sleep(0.5)
        assert not spanning.done()
        here.runs["train"] = SimRun(run_ms=10_000)
        here.story.wait(60)
        write(here, job, 2, b"two\n")
        here.story.wait(11)
        assert here.get("bcg", f"/v1/jobs/{job}")["state"] == "COMPLETED"
        assert spanning.result(5).content == b"one\ntwo\n"
    assert read(here, job, "attempt=1").content == b"one\n"
    assert read(here, job).headers["dure-log-epoch"] == "2"
    assert read(here, job, "attempt=2&follow=true").content == b"two\n"


def test_follow_waits_for_the_first_attempt(here: Site) -> None:
    here.runs["train"] = SimRun(run_ms=1000)
    job = here.submit(hold=True)
    with following(here, job) as future:
        here.ask("bcg", "POST", f"/v1/jobs/{job}/release")
        here.story.settle()
        write(here, job, 1, b"hello\n")
        here.story.wait(2)
        assert future.result(5).content == b"hello\n"
    cancelled = here.submit(hold=True)
    with following(here, cancelled) as future:
        here.ask("bcg", "POST", f"/v1/jobs/{cancelled}/cancel")
        assert future.result(5).content == b""


def test_a_stream_ends_with_its_token(here: Site) -> None:
    here.tokens["spare"] = here.token("bcg")
    job = here.submit()
    write(here, job, 1, b"x\n")
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(read, here, job, "follow=true", "spare")
        time.sleep(0.3)
        here.ask("bcg", "DELETE", f"/v1/tokens/{admin.digest(here.tokens['spare'])[:16]}")
        here.clock.advance(31)
        assert future.result(5).content == b"x\n"


# -- over a real socket --------------------------------------------------------------


@contextmanager
def listening(here: Site) -> Iterator[uvicorn.Server]:
    config = uvicorn.Config(
        here.app, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def connect(server: uvicorn.Server, here: Site, job: int) -> http.client.HTTPConnection:
    port = server.servers[0].sockets[0].getsockname()[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(
        "GET",
        f"/v1/jobs/{job}/logs?follow=true",
        headers={"Authorization": f"Bearer {here.tokens['bcg']}"},
    )
    return connection


def test_streams_come_at_once_are_counted_and_end_with_the_server(tmp_path: Path) -> None:
    with site(tmp_path, limits=LimitsSettings(read_burst=10**6, read_per_s=1e6, streams=1)) as here:
        job = here.submit()
        write(here, job, 1, b"one\n")
        with listening(here) as server:
            first = connect(server, here, job)
            response = first.getresponse()
            assert response.status == 200
            assert response.read1(100) == b"one\n"
            write(here, job, 1, b"two\n")
            assert response.read1(100) == b"two\n"
            second = connect(server, here, job)
            refused = second.getresponse()
            assert refused.status == 429
            assert refused.getheader("retry-after") == "5"
            second.close()
            response.close()
            first.close()
            # The reader went away: its place is free again, soon.
            for _ in range(50):
                if not here.app.state.api.limiter._streams:
                    break
                time.sleep(0.1)
            third = connect(server, here, job)
            response = third.getresponse()
            assert response.status == 200
            assert response.read1(100) == b"one\ntwo\n"
            started = time.monotonic()
            here.app.state.api.stop_streams()
            assert response.read() == b""
            assert time.monotonic() - started < 1.5
            response.close()
            third.close()
        assert here.app.state.api.limiter._streams == {}
