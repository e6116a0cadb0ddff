"""A small installation with its API in front: labs BCG and VIS, users, tokens, two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from litestar.testing import TestClient

from dure.adapters.clock import SystemIds
from dure.adapters.compute.simulated import SimRun
from dure.api.app import create_app
from dure.core.model import Lab, Phase, User
from dure.core.policy import Policy
from dure.engine import admin
from dure.ports import LeaseKey, Store
from dure.settings import LimitsSettings, Settings
from tests.core.build import R3080TI, R4090, node
from tests.story import Story

GENEROUS = LimitsSettings(read_per_s=1e6, read_burst=10**6, submit_per_min=1e6, streams=5)
JOB = {"command": ["train"]}


class Site:
    """Story, application and a client for each kind of person."""

    def __init__(
        self,
        logs: Path | None = None,
        limits: LimitsSettings = GENEROUS,
        policy: Policy | None = None,
        store: Store | None = None,
        **more: Any,
    ) -> None:
        nodes = [
            node("gpu-1", (R4090, 2)),
            node("gpu-2", (R3080TI, 2)),
        ]
        self.story = Story(nodes, labs={"BCG": 0.0, "VIS": 10.0}, policy=policy, store=store)
        self.engine = self.story.engine
        self.clock = self.story.clock
        self.logs = logs
        self.story.backend.log_path = self.log_path  # type: ignore[method-assign]
        self.story.backend.output_dir = lambda key: f"/out/{key.job}.{key.epoch}"  # type: ignore[attr-defined]
        # What an API job does when it is launched, by its name.
        self.story._script = self.script  # type: ignore[method-assign]
        self.story.backend._script = self.script
        self.runs: dict[str, SimRun] = {}
        admin.put_user(self.engine, "root", User(name="ann", lab="BCG"))
        admin.put_user(self.engine, "root", User(name="out", lab="VIS", active=False))
        self.settings = Settings(limits=limits)
        self.app = create_app(
            self.engine, self.story.controller, settings=self.settings, ids=SystemIds(), **more
        )
        self.client = TestClient(self.app, raise_server_exceptions=False)
        self.tokens = {n: self.token(n) for n in ("root", "bcg", "ann", "vis", "out")}

    def token(self, user: str) -> str:
        return admin.make_token(self.engine, SystemIds(), user, "test").secret

    def script(self, order: Any) -> SimRun:
        return self.runs.get(order.name, SimRun(run_ms=3_600_000))

    def log_path(self, key: LeaseKey) -> str | None:
        path = self.logs / f"{key.job}.{key.epoch}" if self.logs else None
        return str(path) if path and path.exists() else None

    def ask(self, who: str, method: str, path: str, json: Any = None, **kw: Any) -> httpx.Response:
        headers = dict(kw.pop("headers", {}))
        if who:
            headers["Authorization"] = f"Bearer {self.tokens[who]}"
        if json is not None:
            kw["content"] = msgspec.json.encode(json)
            headers.setdefault("Content-Type", "application/json")
        return self.client.request(method, path, headers=headers, **kw)

    def get(self, who: str, path: str, **kw: Any) -> Any:
        answer = self.ask(who, "GET", path, **kw)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def submit(self, who: str = "bcg", settle: bool = True, **job: Any) -> int:
        answer = self.ask(who, "POST", "/v1/jobs", JOB | job)
        assert answer.status_code == 201, answer.text
        if settle:
            self.story.settle()
        return answer.json()["id"]

    def etag(self, path: str) -> str:
        return self.ask("root", "GET", path).headers["etag"]

    def edit(self, method: str, path: str, json: Any = None, **kw: Any) -> httpx.Response:
        """A write as an administrator who has just read it."""
        return self.ask("root", method, path, json, headers={"If-Match": self.etag(path)}, **kw)


@contextmanager
def site(*args: Any, **kw: Any) -> Iterator[Site]:
    made = Site(*args, **kw)
    with made.client:
        yield made


def problem(answer: httpx.Response, code: str, status: int | None = None) -> dict[str, Any]:
    """The problem document of an answer, checked against what every one must have."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    told = answer.json()
    assert told["code"] == code, told
    assert told["status"] == answer.status_code
    assert told["type"] == f"/problems/{code}"
    assert told["detail"]
    assert told["title"]
    assert told["hint"]
    assert told["trace_id"]
    assert "{" not in told["detail"] + told["hint"]
    if status is not None:
        assert answer.status_code == status, told
    return told


__all__ = ["GENEROUS", "JOB", "Lab", "Phase", "Site", "problem", "site"]
