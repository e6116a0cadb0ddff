from __future__ import annotations

import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dure import wire
from dure.client import (
    ApiError,
    BadConfig,
    BadReply,
    Client,
    JobCancelled,
    JobDead,
    JobFailed,
    JobTimedOut,
    OutOfMemory,
    Unreachable,
    WaitTimeout,
    config,
)
from dure.client.quantities import gigabytes, moment_ms, seconds, signal_before
from dure.core.model import JobState, Phase
from tests.cli.stub import TOKEN, Drop, Refuse, Stub, done, job_out, why_out

S = JobState


def test_submit_sends_what_was_asked(server: Stub, client: Client) -> None:
    server.on("POST /v1/jobs", job_out())
    job = client.submit(
        ["python", "train.py"],
        gpus=2,
        min_vram="24GB",
        time="4h",
        name="vit",
        signal="USR1@5m",
        retry=3,
        labels={"a": "b"},
    )
    import msgspec

    sent = msgspec.json.decode(server.seen[-1].body, type=wire.JobIn)
    assert (sent.num_gpus, sent.min_vram_gb, sent.time_limit_s) == (2, 24.0, 14_400)
    assert sent.pre_stop_signal == wire.PreStopSignalIn(signal="USR1", before_s=300)
    assert sent.workdir == str(Path.cwd())
    assert (job.id, job.state) == (12, S.GLOBAL_QUEUE_WAIT)
    server.on("GET /v1/jobs/12/why", why_out())
    assert job.why().rank == 3


def test_a_bad_request_is_refused_before_anything_is_sent(server: Stub, client: Client) -> None:
    for wrong in ({"gpus": 9}, {"time": "4"}, {"min_vram": "much"}, {"env": {"A B": "x"}}):
        with pytest.raises(ValueError):
            client.submit(["x"], **wrong)
    assert server.seen == []


def test_a_keyed_post_is_repeated_with_the_same_key(server: Stub, client: Client) -> None:
    server.on(
        "POST /v1/jobs",
        Drop(),
        Refuse(502, "HTTP_502"),
        Refuse(429, "RATE_LIMITED", retry_after="0"),
        job_out(),
    )
    client.submit(["x"])
    keys = {s.headers["idempotency-key"] for s in server.asked("POST /v1/jobs")}
    assert len(server.asked("POST /v1/jobs")) == 4
    assert len(keys) == 1
    client.submit(["x"])
    assert server.seen[-1].headers["idempotency-key"] not in keys


def test_what_may_not_happen_twice_is_sent_once(server: Stub, client: Client) -> None:
    server.on("POST /v1/jobs/12/retry", Drop(), job_out())
    server.on("PUT /v1/maintenance", Refuse(502, "HTTP_502"))
    with pytest.raises(Unreachable):
        client.act(12, "retry")
    with pytest.raises(ApiError):
        client.set_phase(Phase.DRAINING)
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    "answer",
    [
        Refuse(503, "SERVICE_MAINTENANCE"),
        Refuse(429, "QUEUE_LIMIT", retry_after="1"),
        Refuse(429, "RATE_LIMITED", retry_after="3600"),
        Refuse(500, "INTERNAL"),
        Refuse(404, "NOT_FOUND"),
    ],
)
def test_what_waiting_cannot_help_is_not_repeated(
    server: Stub, client: Client, answer: Refuse
) -> None:
    server.on("POST /v1/jobs", answer)
    with pytest.raises(ApiError) as caught:
        client.submit(["x"])
    assert caught.value.code == answer.problem.code
    assert len(server.seen) == 1


def test_one_connection_is_kept_and_a_dead_one_noticed(server: Stub, client: Client) -> None:
    for _ in range(5):
        client.me()
    assert server.connections == 1

    @contextmanager
    def closed_by_server() -> Iterator[None]:
        client._transport._kept.sock.shutdown(socket.SHUT_RDWR)
        yield

    server.on("PUT /v1/maintenance", wire.MaintenanceOut(phase=Phase.DRAINING))
    with closed_by_server():
        client.set_phase(Phase.DRAINING)  # could not be repeated, and need not be
    assert server.connections == 2
    assert len(server.asked("PUT /v1/maintenance")) == 1


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with Client(url, TOKEN) as client, pytest.raises(Unreachable) as caught:
            client.me()
    assert TOKEN not in str(caught.value)


def test_an_answer_that_is_not_dures(server: Stub, client: Client) -> None:
    server.on("GET /v1/me", b"<html>Sign in to Wi-Fi</html>")
    with pytest.raises(BadReply):
        client.me()
    server.on("GET /v1/pool", b"x")
    server.on("GET /v1/pool", Refuse(502, "HTTP_502"))
    with pytest.raises(ApiError):
        client.pool()


@pytest.mark.parametrize(
    ("state", "error", "raised"),
    [
        (S.FAILED, None, JobFailed),
        (S.FAILED, "OOM_NO_LARGER_TIER", OutOfMemory),
        (S.CANCELLED, None, JobCancelled),
        (S.TIMED_OUT, None, JobTimedOut),
        (S.DEAD, None, JobDead),
    ],
)
def test_wait_raises_how_it_ended(
    server: Stub, client: Client, state: JobState, error: str | None, raised: type[Exception]
) -> None:
    why = wire.ErrorOut(code=error, text="t", params={"tier": "RTX4090"}) if error else None
    server.on("GET /v1/jobs/12", job_out(), Refuse(502, "HTTP_502"), done(state=state, error=why))
    with pytest.raises(raised) as caught:
        client.job(12).wait(timeout="1m")
    assert caught.value.job.state is state
    if raised is OutOfMemory:
        assert caught.value.tier == "RTX4090"


def test_wait_gives_up_or_returns(server: Stub, client: Client) -> None:
    server.on("GET /v1/jobs/12", job_out())
    with pytest.raises(WaitTimeout):
        client.job(12).wait(timeout=0.05)
    server.on("GET /v1/jobs/12", job_out(), done())
    assert client.job(12).wait().state is S.COMPLETED


# -- logs -----------------------------------------------------------------------------


class LogServer:
    """Serves logs by epoch, and drops each stream after `piece` bytes."""

    def __init__(self, logs: dict[int, bytes], piece: int) -> None:
        self.logs = logs
        self.piece = piece
        self.streams = 0
        self.job_answers: list[wire.JobOut] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            thread.start()
            self._threads.append(thread)

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader:
            while line := reader.readline():
                while reader.readline().strip():
                    pass
                if not self._answer(connection, line.decode().split(" ")[1]):
                    return

    def _answer(self, connection: socket.socket, path: str) -> bool:
        from urllib.parse import parse_qs, urlsplit

        import msgspec

        parts = urlsplit(path)
        query = {k: v[0] for k, v in parse_qs(parts.query).items()}
        if not parts.path.endswith("/logs"):
            answers = self.job_answers
            job = answers.pop(0) if len(answers) > 1 else answers[0]
            body = msgspec.json.encode(job)
            connection.sendall(
                self._head("application/json", f"Content-Length: {len(body)}") + body
            )
            return True
        epoch = int(query.get("attempt", max(self.logs)))
        log = self.logs[epoch]
        start = int(query.get("offset", 0))
        if "tail" in query:
            lines = log.splitlines(keepends=True)[-int(query["tail"]) :]
            start = len(log) - len(b"".join(lines))
        if query.get("follow") != "true":
            body = log[start : start + 7]
            more = f"Content-Length: {len(body)}\r\nDure-Log-Epoch: {epoch}"
            more += f"\r\nDure-Log-Next-Offset: {start + len(body)}"
            connection.sendall(self._head("text/plain", more) + body)
            return True
        self.streams += 1
        body = log[start : start + self.piece]
        connection.sendall(self._head("text/plain", "Transfer-Encoding: chunked"))
        if body:
            connection.sendall(f"{len(body):x}\r\n".encode() + body + b"\r\n")
        return False  # dropped in the middle

    @staticmethod
    def _head(kind: str, more: str) -> bytes:
        return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{more}\r\n\r\n".encode()


@pytest.fixture
def log_server() -> Iterator[LogServer]:
    made = LogServer({1: "first 줄\nout of mem".encode(), 2: b"a\r\nb\nlast"}, piece=4)
    yield made
    made.close()


def test_following_resumes_after_every_drop_and_spans_attempts(log_server: LogServer) -> None:
    running = done(state=S.RUNNING, ended_ms=None, exit_code=None)
    second = done(state=S.RUNNING, ended_ms=None, exit_code=None, epoch=2)
    waiting = job_out(epoch=1)
    log_server.job_answers = [
        job_out(),
        running,
        *[running] * 3,
        waiting,
        second,
        *[second] * 4,
        done(epoch=2),
    ]
    with Client(log_server.url, TOKEN) as client:
        lines = list(client.job(12).logs(follow=True))
    assert [tuple(line) for line in lines] == [
        ("first 줄", 1),
        ("out of mem", 1),
        ("a", 2),
        ("b", 2),
        ("last", 2),
    ]
    assert log_server.streams >= 4


def test_following_from_a_tail(log_server: LogServer) -> None:
    running = done(state=S.RUNNING, epoch=2)
    log_server.job_answers = [running, running, running, done(epoch=2)]
    log_server.logs[2] = b"1\n2\n3\n4\n"
    with Client(log_server.url, TOKEN) as client:
        job = client.job(12)
        assert [line.text for line in job.logs(follow=True, tail=2)] == ["3", "4"]
        assert [line.text for line in job.logs()] == ["1", "2", "3", "4"]
        assert [line.text for line in job.logs(tail=1)] == ["4"]
        assert [line.text for line in job.logs(attempt=1)] == ["first 줄", "out of mem"]


# -- settings --------------------------------------------------------------------------


def test_settings_are_private_and_tokens_go_only_home(monkeypatch: pytest.MonkeyPatch) -> None:
    where = config.save("lab", config.Profile(url="http://gpu.lab:1", token=TOKEN))
    assert stat.S_IMODE(Path(where).stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(where).parent.stat().st_mode) == 0o700
    assert [p.name for p in Path(where).parent.iterdir()] == ["config.toml"]
    config.save("other", config.Profile(url="https://x.org/dure/", token='q"uo\\te'))
    assert config.resolve(profile="lab").token == TOKEN
    assert config.resolve().token == 'q"uo\\te'
    assert config.resolve().url == "https://x.org/dure"
    assert config.resolve("http://gpu.lab:1/").token == TOKEN
    assert config.resolve("http://elsewhere:1").token == ""
    monkeypatch.setenv("DURE_URL", "http://elsewhere:1")
    assert config.resolve().token == ""
    monkeypatch.setenv("DURE_TOKEN", "t")
    assert config.resolve() == config.Profile(url="http://elsewhere:1", token="t")
    assert config.resolve(profile="lab").token == TOKEN
    with pytest.raises(BadConfig, match="no profile"):
        config.resolve(profile="nowhere")


def test_secrets_are_never_quoted() -> None:
    assert TOKEN not in repr(config.Profile(token=TOKEN))
    with Client("http://h:1", TOKEN) as client:
        assert TOKEN not in repr(client)
    with pytest.raises(BadConfig) as caught:
        Client("http://h:1", f"{TOKEN}\nX-Evil: 1")
    assert TOKEN not in str(caught.value)
    where = Path(config.save("lab", config.Profile(token=TOKEN)))
    where.write_text(f'token = "{TOKEN}')
    with pytest.raises(BadConfig) as caught:
        config.resolve()
    assert TOKEN not in str(caught.value)
    with pytest.raises(BadConfig) as caught:
        Client("http://me:hush-hush@h:1", TOKEN)
    assert "hush-hush" not in str(caught.value)


# -- quantities ------------------------------------------------------------------------


def test_quantities() -> None:
    for text, want in {
        "45s": 45,
        "90m": 5400,
        "1h30m": 5400,
        "1h 30m": 5400,
        "1.5h": 5400,
        "2d": 172_800,
        "04:00:00": 14_400,
        "1-00:00:30": 86_430,
    }.items():
        assert seconds(text) == want, text
    for wrong in ("4", "4:00", "", "h", "4x", "-1h", "1h junk"):
        with pytest.raises(ValueError):
            seconds(wrong)
    assert [gigabytes(t) for t in ("24", "24GB", "24 GiB", "0.5t", 10)] == [24, 24, 24, 512, 10]
    with pytest.raises(ValueError):
        gigabytes("24 cats")
    now = datetime(2026, 11, 30, 21, 0, tzinfo=UTC)
    assert moment_ms("22:00", now) == moment_ms("+1h", now)
    assert moment_ms("20:00", now) == moment_ms("+23h", now)
    assert moment_ms("2026-11-30T22:00:00+00:00") == moment_ms("22:00", now)
    with pytest.raises(ValueError):
        moment_ms("soon")
    assert signal_before("sigusr1@5m") == ("USR1", 300)
    with pytest.raises(ValueError):
        signal_before("KILL@5m")


def test_importing_the_client_stays_light() -> None:
    script = (
        "import sys; from dure.client import Client; "
        "bad = {'click', 'rich', 'sqlalchemy', 'litestar', 'http.client', 'asyncio', "
        "'dure.settings', 'dure.ports'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
