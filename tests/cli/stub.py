"""A small server that speaks the API's structs, with failures to order.

Every answer is a `wire` struct (or a `Refuse`), so the stub cannot drift from the API.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import msgspec

from dure import wire
from dure.core.model import JobState, NodeHealth, Phase, Role

TOKEN = "dure_pat_SECRETSECRETSECRET"
BODIES: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/v1/jobs"): wire.JobIn,
    ("POST", "/v1/submit/preview"): wire.JobIn,
    ("PATCH", "/v1/jobs/N"): wire.JobPatch,
    ("PUT", "/v1/tiers/N"): wire.TierIn,
    ("PUT", "/v1/labs/N"): wire.LabIn,
    ("PUT", "/v1/users/N"): wire.UserIn,
    ("PATCH", "/v1/nodes/N"): wire.NodePatch,
    ("POST", "/v1/tokens"): wire.TokenIn,
    ("PUT", "/v1/maintenance"): wire.MaintenanceIn,
}


class Refuse(Exception):  # noqa: N818
    """Answer with a problem."""

    def __init__(self, status: int, code: str, retry_after: str = "", **more: object) -> None:
        super().__init__(code)
        self.status = status
        self.retry_after = retry_after
        fields = {
            "type": f"/problems/{code}",
            "title": code,
            "status": status,
            "detail": f"sentence of {code}",
            "code": code,
            "hint": "a hint",
            "trace_id": "trace-1",
        }
        self.problem = wire.Problem(**{**fields, **more})


class Drop(Exception):  # noqa: N818
    """Close the connection without an answer."""


class Seen(msgspec.Struct):
    """A request as it came."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


def job_out(number: int = 12, **changes: object) -> wire.JobOut:
    """A job; only what the test is about needs naming."""
    plain: dict[str, object] = {
        "id": number,
        "name": "train",
        "lab": "BCG",
        "user": "bcg",
        "state": JobState.GLOBAL_QUEUE_WAIT,
        "state_text": "Waiting",
        "command": ["python", "train.py"],
        "num_gpus": 1,
        "tiers": [],
        "min_vram_gb": 0.0,
        "node": None,
        "time_limit_s": 3600,
        "oom_escalate": True,
        "labels": {},
        "submitted_ms": 1_700_000_000_000,
        "queue_entered_ms": None,
        "eligible_ms": None,
        "not_before_ms": None,
        "started_ms": None,
        "ended_ms": None,
        "exit_code": None,
        "held": False,
        "epoch": 0,
        "starts": 0,
        "retries": 0,
        "version": 1,
    }
    return wire.JobOut(**{**plain, **changes})


def done(number: int = 12, **changes: object) -> wire.JobOut:
    """A job that completed after a minute."""
    plain: dict[str, object] = {
        "state": JobState.COMPLETED,
        "state_text": "Done",
        "started_ms": 1_700_000_000_000,
        "ended_ms": 1_700_000_060_000,
        "exit_code": 0,
        "epoch": 1,
        "starts": 1,
    }
    return job_out(number, **{**plain, **changes})


def queue_row(rank: int, number: int, **changes: object) -> wire.QueueRow:
    """A line of the queue."""
    plain: dict[str, object] = {
        "rank": rank,
        "job": number,
        "name": f"job-{number}",
        "lab": "BCG",
        "user": "bcg",
        "state": JobState.GLOBAL_QUEUE_WAIT,
        "num_gpus": 2,
        "min_vram_gb": 24.0,
        "tiers": [],
        "waited_s": 660,
        "lab_usage_tflop_s": "297360",
        "reservation": None,
        "reason": wire.ReasonOut(code="NO_FREE_GPU", text="all 4 fitting GPUs are busy"),
    }
    return wire.QueueRow(**{**plain, **changes})


def queue_out(*rows: wire.QueueRow, **changes: object) -> wire.QueueOut:
    plain: dict[str, object] = {
        "as_of_ms": 1_700_000_000_000,
        "cycle": 3,
        "phase": Phase.NORMAL,
        "labs": [wire.LabLine(lab="BCG", usage_tflop_s="1", weight=1, waiting=len(rows))],
        "items": list(rows),
        "personal": 0,
        "node_wait": 0,
    }
    return wire.QueueOut(**{**plain, **changes})


def why_out(**changes: object) -> wire.WhyOut:
    plain: dict[str, object] = {
        "job": 12,
        "state": JobState.GLOBAL_QUEUE_WAIT,
        "state_text": "Waiting",
        "reason": wire.ReasonOut(code="RANK_BEHIND", text="2 jobs stand before it"),
        "rank": 3,
        "ahead_labs": ["VIS"],
        "placements": [
            wire.PlacementNoteOut(
                node="n1", tier="RTX4090", idle=0, capacity=4, in_service=True, fits=True
            )
        ],
    }
    return wire.WhyOut(**{**plain, **changes})


def pool_tier(name: str, **changes: object) -> wire.PoolTier:
    plain: dict[str, object] = {
        "name": name,
        "vram_gb": 24.0,
        "tflops": 82.6,
        "max_gpus": 2,
        "sort_order": 1,
        "active": True,
        "simulated": False,
        "run": 1,
        "reserved": 0,
        "idle": 3,
        "down": 0,
        "start_now": 3,
        "next_free_ms": None,
    }
    return wire.PoolTier(**{**plain, **changes})


def node_out(name: str = "n1", **changes: object) -> wire.NodeOut:
    gpu = wire.GpuOut(index=0, tier="RTX4090", state="idle", uuid="", simulated=True)
    plain: dict[str, object] = {
        "name": name,
        "backend": "local",
        "health": NodeHealth.STABLE,
        "drained": False,
        "drain_reason": "",
        "simulated": True,
        "cores": 8,
        "memory_mib": 1000,
        "gpus": [gpu],
    }
    return wire.NodeOut(**{**plain, **changes})


def lab_out(name: str, tflop_s: str = "594720", **changes: object) -> wire.LabOut:
    plain: dict[str, object] = {
        "name": name,
        "title": "",
        "weight": 1.0,
        "usage_tflop_s": tflop_s,
        "members": 2,
        "limits": wire.LimitsIn(),
    }
    return wire.LabOut(**{**plain, **changes})


ME = wire.MeOut(user="bcg", lab="BCG", role=Role.MEMBER, server_version="0.1.0")
Answer = msgspec.Struct | Exception | bytes | None | Callable[[Seen], object]


class Stub:
    """Answers by `METHOD /path`; a list is used up one by one, its last answer stays."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer]] = {"GET /v1/me": [ME]}
        self.seen: list[Seen] = []
        self.connections = 0
        self.log: bytes = b""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                stub.connections += 1
                super().setup()

            def log_message(self, *args: object) -> None:
                pass

            def do(self) -> None:
                stub.handle(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def on(self, what: str, *answers: Answer) -> None:
        self.answers[what] = list(answers)

    def asked(self, what: str) -> list[Seen]:
        method, path = what.split(" ")
        return [s for s in self.seen if (s.method, s.path) == (method, path)]

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        size = int(request.headers.get("Content-Length") or 0)
        seen = Seen(
            request.command,
            parts.path,
            parse_qs(parts.query),
            {k.lower(): v for k, v in request.headers.items()},
            request.rfile.read(size),
        )
        self.seen.append(seen)
        try:
            self.write(request, self.answer(seen))
        except Refuse as refused:
            self.write(request, refused)
        except Drop:
            request.close_connection = True

    def answer(self, seen: Seen) -> object:
        shape = re.sub(r"^(/v1/\w+)/[^/]+$", r"\1/N", seen.path)
        kind = BODIES.get((seen.method, shape)) or BODIES.get((seen.method, seen.path))
        if kind is not None:
            msgspec.json.decode(seen.body, type=kind)
        planned = self.answers.get(f"{seen.method} {seen.path}")
        if planned is None:
            return Refuse(404, "NOT_FOUND")
        one = planned.pop(0) if len(planned) > 1 else planned[0]
        if callable(one):
            one = one(seen)
        if isinstance(one, Drop):
            raise one
        return one

    def write(self, request: BaseHTTPRequestHandler, answer: object) -> None:
        headers = {"Content-Type": "application/json", "ETag": '"e1-x"'}
        status = 201 if request.command == "POST" else 200
        if isinstance(answer, Refuse):
            status, body = answer.status, msgspec.json.encode(answer.problem)
            headers["Content-Type"] = "application/problem+json"
            if answer.retry_after:
                headers["Retry-After"] = answer.retry_after
        elif answer is None:
            status, body = 204, b""
        elif isinstance(answer, bytes):
            body = answer
            headers["Content-Type"] = "text/plain"
        else:
            body = msgspec.json.encode(answer)
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
