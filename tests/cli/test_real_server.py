"""The command line against the real application: engine, memory store, simulated machines."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from click.testing import CliRunner, Result

from dure.adapters.compute.simulated import SimRun
from dure.cli import cli
from dure.client import Client, JobCancelled
from tests.api.site import Site, site
from tests.story import CUDA_OOM


class Real:
    """A running server, and `dure` as one of its people."""

    def __init__(self, here: Site, url: str) -> None:
        self.here = here
        self.url = url

    def __call__(self, *args: str, who: str = "bcg", lang: str = "en") -> Result:
        env = {"DURE_URL": self.url, "DURE_TOKEN": self.here.tokens[who], "DURE_LANG": lang}
        result = CliRunner().invoke(cli, list(args), env=env, prog_name="dure")
        assert self.here.tokens[who] not in result.output
        return result

    def client(self, who: str = "bcg") -> Client:
        return Client(self.url, self.here.tokens[who])

    def submit(self, *args: str, who: str = "bcg") -> str:
        result = self("submit", "--parsable", *args, "--", "train", who=who)
        assert result.exit_code == 0, result.output
        self.here.story.settle()
        return result.stdout.strip()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Real]:
    with site(tmp_path) as here:
        config = uvicorn.Config(
            here.app, port=0, log_level="warning", timeout_graceful_shutdown=1, lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Real(here, f"http://127.0.0.1:{port}")
        here.app.state.api.stop_streams()
        server.should_exit = True
        thread.join()


def test_submit_queue_why_cancel(real: Real) -> None:
    first = real.submit("-g", "2", "--vram", "24GB", "-t", "1h")
    second = real.submit("-g", "2", "--vram", "24", "-n", "second")
    shown = json.loads(real("show", first, "--json", "state,placement,num_gpus").stdout)
    assert shown["placement"]["tier"] == "RTX4090"
    line = real("queue", "--no-header")
    assert line.exit_code == 0, line.output
    assert line.stdout.split("\t")[:3] == ["1", second, "second"]
    assert "NO_FREE_GPU" in real("why", second, "-q").stdout
    korean = real("why", "second", lang="ko").stdout
    assert "모두 사용 중" in korean
    assert real("cancel", second).exit_code == 0
    assert real("wait", second).exit_code == 11
    assert real("cancel", second).exit_code == 2  # it had already ended
    told = real("cancel", first)
    assert "may save until" in told.stderr
    assert real("why", "999").exit_code == 3
    assert real("show", first, who="vis").exit_code in {3, 4}


def test_no_fit_names_what_would(real: Real) -> None:
    result = real("submit", "-g", "4", "--vram", "80", "--", "train")
    assert result.exit_code == 2
    assert "-g 2 --vram 24 --tier RTX4090" in result.stderr
    assert "NO_FIT_PLACEMENT" in result.stderr
    preview = real("submit", "--dry-run", "-g", "2", "--", "train")
    assert preview.exit_code == 0, preview.output
    assert "It would start now." in preview.stderr


def test_usage_after_an_hour(real: Real) -> None:
    real.here.runs["train"] = SimRun(run_ms=3_600_000)
    job = real.submit("--vram", "24")
    real.here.story.wait(3700)
    assert real("wait", job).exit_code == 0
    labs = json.loads(real("usage", "--json", "name,usage_tflop_s").stdout)
    mine = next(x for x in labs if x["name"] == "BCG")
    assert float(mine["usage_tflop_s"]) == pytest.approx(297_360, rel=1e-3)
    assert "RUN\t1.00 4090-h = 297,360 TFLOP-s" in real("usage", "--lab", "BCG").stdout
    assert len(real("usage", "--lab", "BCG", "--ledger", "-q").stdout.split()) == 1
    assert real("usage", "--lab", "VIS").exit_code == 4


def test_following_a_job_over_an_escalation(real: Real) -> None:
    here = real.here
    small, large = SimRun(run_ms=1000, evidence=CUDA_OOM), SimRun(run_ms=1000)
    runs = iter([small, large])
    here.story.backend._script = lambda order: next(runs)
    here.story.node("gpu-1", drained=True)
    job = real.submit()
    here.story.node("gpu-1", drained=False)
    (here.logs / f"{job}.1").write_text("CUDA out of memory\n")
    got: list[tuple[str, int]] = []

    def follow() -> None:
        with real.client() as client:
            got.extend(tuple(line) for line in client.job(int(job)).logs(follow=True))

    reader = threading.Thread(target=follow)
    reader.start()
    time.sleep(0.2)
    here.story.wait(2)
    (here.logs / f"{job}.2").write_text("done 끝\n")
    here.story.wait(5)
    reader.join(20)
    assert not reader.is_alive()
    assert got == [("CUDA out of memory", 1), ("done 끝", 2)]
    told = real("run", "--key", "again", "-n", "x", "--hold", "-d", "--", "train")
    assert told.exit_code == 0
    assert real("logs", job).stdout == "done 끝\n"
    assert real("logs", job, "--attempt", "1").stdout == "CUDA out of memory\n"
    assert real("logs", "-f", job).stdout == "CUDA out of memory\ndone 끝\n"


def test_wait_in_python(real: Real) -> None:
    with real.client() as client:
        job = client.submit(["train"], hold=True, key="once")
        assert client.submit(["train"], hold=True, key="once").id == job.id
        assert job.release().state
        real.here.story.settle()
        job.cancel()
        real.here.story.wait(200)
        with pytest.raises(JobCancelled):
            job.wait(timeout="10s")
        assert job.attempts()[0].epoch == 1
        assert next(e.name for e in client.events(job.id)) == "job.submitted"


def test_administration(real: Real) -> None:
    def root(*args: str) -> Result:
        result = real(*args, who="root")
        assert result.exit_code == 0, result.output
        return result

    root("admin", "tier", "set", "H100", "--vram-gb", "80", "--tflops", "989", "--order", "90")
    root("admin", "tier", "set", "H100", "--max-gpus", "4")
    tier = json.loads(root("admin", "tier", "ls", "--json").stdout)[0]
    assert (tier["name"], tier["max_gpus"], tier["tflops"]) == ("H100", 4, 989.0)
    root("admin", "tier", "rm", "H100", "--yes")
    root("admin", "lab", "set", "NEW", "--title", "새 연구실", "--weight", "2")
    root("admin", "lab", "set", "NEW", "--slots", "3")
    assert "새 연구실\t2\t0" in root("admin", "lab", "ls").stdout
    root("admin", "user", "set", "kim", "--lab", "NEW")
    root("admin", "user", "set", "kim", "--role", "admin")
    assert "kim\tNEW\tadmin" in root("admin", "user", "ls").stdout
    secret = root("admin", "token", "new", "--user", "kim").stdout.strip()
    with Client(real.url, secret) as kim:
        assert kim.me().lab == "NEW"
        token_id = kim.tokens()[0].id
    root("admin", "token", "rm", token_id, "-y")
    root("admin", "node", "drain", "gpu-1", "--reason", "fan")
    assert "fan" in root("admin", "node", "ls").stdout
    root("admin", "node", "resume", "gpu-1")
    root("admin", "maintenance", "start")
    assert real("submit", "--", "x").exit_code == 7
    root("admin", "maintenance", "end")
    assert real("admin", "maintenance", "start").exit_code == 4
    assert json.loads(real("api", "GET", "/v1/me").stdout)["lab"] == "BCG"


@pytest.mark.parametrize(
    "args",
    [
        ("queue",),
        ("queue", "--personal"),
        ("queue", "--mine"),
        ("pool",),
        ("pool", "--nodes"),
        ("jobs",),
    ],
)
def test_listings(real: Real, args: tuple[str, ...]) -> None:
    real.submit("--hold")
    for _ in range(2):
        real.submit("-g", "2", "--vram", "24")
    for extra in ([], ["--json"], ["-q"]):
        result = real(*args, *extra)
        assert result.exit_code == 0, result.output
        assert result.stdout
