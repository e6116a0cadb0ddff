"""Who may call what: every route times every kind of caller. A route without a row fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dure.adapters.compute.simulated import SimRun
from dure.api.app import table
from dure.core.model import Evidence
from dure.engine import admin
from tests.api.site import JOB, Site, problem, site

CALLERS = ("", "bcg", "ann", "vis", "root")
"""Nobody, the job's owner, a member of the same lab, one of another lab, an administrator."""


def running(s: Site) -> int:
    return s.submit("bcg")


def waiting(s: Site) -> int:
    return s.submit("bcg", not_before_ms=s.clock.now_ms() + 10**6)


def held(s: Site) -> int:
    return s.submit("bcg", hold=True)


def failed(s: Site) -> int:
    s.runs["train"] = SimRun(run_ms=0, evidence=Evidence(exit_code=1))
    return s.submit("bcg")


def none(_: Site) -> int:
    return 0


class Row(NamedTuple):
    path: str
    expected: tuple[int, int, int, int, int]
    prepare: Callable[[Site], int] = none
    body: Any = None


OPEN = (200, 200, 200, 200, 200)
ALL = (401, 200, 200, 200, 200)
OWN_LAB = (401, 200, 200, 403, 200)
OWNER = (401, 200, 403, 403, 200)
ADMIN = (401, 403, 403, 403, 200)
TIER = {"vram_gb": 8, "tflops": 1}
MATRIX = {
    "show_schema": Row("/v1/schema", OPEN),
    "healthz": Row("/healthz", OPEN),
    "show_maintenance": Row("/v1/maintenance/status", OPEN),
    "set_maintenance": Row("/v1/maintenance", ADMIN, body={"phase": "DRAINING"}),
    "show_me": Row("/v1/me", ALL),
    "show_my_queue": Row("/v1/me/queue", ALL),
    "order_my_queue": Row("/v1/me/queue", (401, 200, 404, 404, 404), held, {"jobs": ["JOB"]}),
    "submit_job": Row("/v1/jobs", (401, 201, 201, 201, 201), body=JOB),
    "preview_job": Row("/v1/submit/preview", ALL, body=JOB),
    "list_jobs": Row("/v1/jobs", ALL),
    "show_job": Row("/v1/jobs/JOB", OWN_LAB, running),
    "edit_job": Row("/v1/jobs/JOB", OWNER, waiting, {"name": "new"}),
    "cancel_job": Row("/v1/jobs/JOB/cancel", OWNER, running),
    "hold_job": Row("/v1/jobs/JOB/hold", OWNER, waiting),
    "release_job": Row("/v1/jobs/JOB/release", OWNER, held),
    "retry_job": Row("/v1/jobs/JOB/retry", OWNER, failed),
    "rerun_job": Row("/v1/jobs/JOB/rerun", (401, 201, 403, 403, 201), running),
    "why_job": Row("/v1/jobs/JOB/why", OWN_LAB, waiting),
    "list_attempts": Row("/v1/jobs/JOB/attempts", OWN_LAB, running),
    "list_events": Row("/v1/jobs/JOB/events", OWN_LAB, running),
    "read_log": Row("/v1/jobs/JOB/logs", OWN_LAB, running),
    "show_queue": Row("/v1/queue", ALL, waiting),
    "show_pool": Row("/v1/pool", ALL, running),
    "list_tiers": Row("/v1/tiers", ALL),
    "show_tier": Row("/v1/tiers/RTX4090", ALL),
    "put_tier": Row("/v1/tiers/NEW", (401, 403, 403, 403, 200), body=TIER),
    "remove_tier": Row("/v1/tiers/OLD", (401, 403, 403, 403, 204)),
    "show_calibration": Row("/v1/forecasts/calibration", ADMIN),
    "list_nodes": Row("/v1/nodes", ALL),
    "show_node": Row("/v1/nodes/gpu-1", ALL),
    "edit_node": Row("/v1/nodes/gpu-1", ADMIN, body={"drained": True}),
    "list_labs": Row("/v1/labs", ALL),
    "show_lab": Row("/v1/labs/BCG", ALL),
    "put_lab": Row("/v1/labs/BCG", ADMIN, body={"title": "Lab"}),
    "show_usage": Row("/v1/labs/BCG/usage", OWN_LAB),
    "list_users": Row("/v1/users", ALL),
    "show_user": Row("/v1/users/ann", OWN_LAB),
    "put_user": Row("/v1/users/ann", ADMIN, body={"lab": "BCG"}),
    "list_tokens": Row("/v1/tokens", ALL),
    "make_token": Row("/v1/tokens", (401, 201, 201, 201, 201), body={}),
    "revoke_token": Row("/v1/tokens/TOKEN", (401, 204, 404, 404, 204)),
}


def test_every_route_has_a_row() -> None:
    assert {r.name for r in table()} == set(MATRIX)


@pytest.mark.parametrize("route", table(), ids=lambda r: r.name)
def test_access(route: Any, tmp_path: Path) -> None:
    row = MATRIX[route.name]
    with site(tmp_path) as here:
        assert here.ask("root", "PUT", "/v1/tiers/OLD", TIER).status_code == 200
        for who, expected in zip(CALLERS, row.expected, strict=True):
            job = row.prepare(here)
            token = ""
            if "TOKEN" in row.path:
                here.tokens["spare"] = here.token("bcg")
                token = spare_id(here)
            path = row.path.replace("JOB", str(job)).replace("TOKEN", token)
            body = {"jobs": [job]} if row.body == {"jobs": ["JOB"]} else row.body
            headers = {}
            if route.edits and "NEW" not in path:
                headers["If-Match"] = here.etag(path)
            answer = here.ask(who, route.method, path, body, headers=headers)
            assert answer.status_code == expected, (who, answer.text)
            if expected == 401:
                problem(answer, "UNAUTHENTICATED")
                assert answer.headers["www-authenticate"].startswith("Bearer")
            elif expected == 403:
                problem(answer, "FORBIDDEN")


def spare_id(here: Site) -> str:
    return admin.digest(here.tokens["spare"])[:16]


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer ", "Bearer nope", "Basic dXNlcjpwdw==", "nope", "Bearer " + "x" * 5000],
)
def test_no_valid_token(here: Site, header: str) -> None:
    answer = here.client.get("/v1/me", headers={"Authorization": header})
    problem(answer, "UNAUTHENTICATED", 401)


def test_token_in_odd_bytes(here: Site) -> None:
    answer = here.client.get("/v1/me", headers=[(b"Authorization", b"Bearer \xff\xfe")])
    problem(answer, "UNAUTHENTICATED", 401)


def test_inactive_users_and_expired_tokens_are_nobody(here: Site) -> None:
    problem(here.ask("out", "GET", "/v1/me"), "UNAUTHENTICATED", 401)
    here.clock.advance(91 * 86_400)
    problem(here.ask("bcg", "GET", "/v1/me"), "UNAUTHENTICATED", 401)


def test_revoked_token_is_refused_at_once(here: Site) -> None:
    here.tokens["spare"] = here.token("bcg")
    assert here.ask("spare", "GET", "/v1/me").status_code == 200
    assert here.ask("bcg", "DELETE", f"/v1/tokens/{spare_id(here)}").status_code == 204
    problem(here.ask("spare", "GET", "/v1/me"), "UNAUTHENTICATED", 401)


def test_other_labs_see_only_what_the_queue_shows(here: Site) -> None:
    for _ in range(4):
        here.submit("bcg")
    secret = here.submit("bcg", command=["secret-program"], env={"KEY": "secret-value"}, name="n")
    row = next(r for r in here.get("vis", "/v1/queue")["items"] if r["job"] == secret)
    assert row["lab"] == "BCG"
    assert row["user"] == "bcg"
    for who in ("bcg", "vis", "root"):
        for path in ("/v1/queue", "/v1/pool", "/v1/jobs", "/v1/nodes", f"/v1/jobs/{secret}"):
            text = here.ask(who, "GET", path).text
            assert "secret-value" not in text
            assert who != "vis" or "secret-program" not in text
    assert here.get("vis", "/v1/jobs")["items"] == []
    problem(here.ask("vis", "GET", "/v1/jobs?lab=BCG"), "FORBIDDEN", 403)
    assert here.get("vis", "/v1/jobs?user=bcg")["items"] == []
    assert len(here.get("root", "/v1/jobs")["items"]) == 5
    assert len(here.get("ann", "/v1/jobs")["items"]) == 5


def test_members_read_the_people_of_their_own_lab(here: Site) -> None:
    assert {u["name"] for u in here.get("bcg", "/v1/users")["items"]} == {"ann", "bcg", "root"}
    assert {u["name"] for u in here.get("root", "/v1/users")["items"]} >= {"ann", "vis", "out"}
    # Unknown people and those of other labs look the same.
    problem(here.ask("bcg", "GET", "/v1/users/vis"), "FORBIDDEN")
    problem(here.ask("bcg", "GET", "/v1/users/nobody"), "FORBIDDEN")
    problem(here.ask("root", "GET", "/v1/users/nobody"), "NOT_FOUND")


def test_only_administrators_make_tokens_for_others(here: Site) -> None:
    problem(here.ask("bcg", "POST", "/v1/tokens", {"user": "ann"}), "FORBIDDEN", 403)
    made = here.ask("root", "POST", "/v1/tokens", {"user": "ann", "label": "ci", "days": 1}).json()
    assert made["user"] == "ann"
    here.tokens["new"] = made["secret"]
    assert here.get("new", "/v1/me")["user"] == "ann"
    listed = here.get("ann", "/v1/tokens")["items"]
    assert made["id"] in {t["id"] for t in listed}
    assert all(t["secret"] is None for t in listed)
