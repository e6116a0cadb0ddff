"""Every error code has a status, a sentence and a way to get it; bad input is never a 5xx."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dure.api import problems
from dure.api.problems import STATUS, Unreadable, field_error, language
from dure.core.errors import DureError, ErrorCode
from dure.core.model import Phase
from dure.core.policy import Policy
from dure.engine import commands
from tests.api.site import GENEROUS, JOB, Site, problem, site

C = ErrorCode
LIMITED = Policy(max_time_limit_s=3600, max_gpus_per_job=4, waiting_per_user=1)


def test_every_code_has_a_status() -> None:
    assert set(STATUS) == set(ErrorCode)


def invalid(s: Site) -> Any:
    return s.ask("bcg", "POST", "/v1/jobs", {"command": []})


def no_fit(s: Site) -> Any:
    return s.ask("bcg", "POST", "/v1/jobs", JOB | {"min_vram_gb": 500, "time_limit_s": 60})


def too_long(s: Site) -> Any:
    return s.ask("bcg", "POST", "/v1/jobs", JOB | {"time_limit_s": 7200})


def too_many_gpus(s: Site) -> Any:
    return s.ask("bcg", "POST", "/v1/jobs", JOB | {"num_gpus": 5})


def queue_full(s: Site) -> Any:
    s.submit("bcg", hold=True, time_limit_s=60)
    return s.ask("bcg", "POST", "/v1/jobs", JOB | {"time_limit_s": 60})


def wrong_state(s: Site) -> Any:
    return s.ask("bcg", "POST", f"/v1/jobs/{s.submit(time_limit_s=60)}/hold")


def already_ended(s: Site) -> Any:
    job = s.submit(hold=True, time_limit_s=60)
    s.ask("bcg", "POST", f"/v1/jobs/{job}/cancel")
    return s.ask("bcg", "POST", f"/v1/jobs/{job}/cancel")


def mismatch(s: Site) -> Any:
    body, key = JOB | {"time_limit_s": 60}, {"Idempotency-Key": "k"}
    s.ask("bcg", "POST", "/v1/jobs", body, headers=key)
    return s.ask("bcg", "POST", "/v1/jobs", body | {"name": "other"}, headers=key)


def raised(code: ErrorCode, **params: Any) -> Callable[[Site], Any]:
    """Codes that only another store or process could raise."""

    def ask(s: Site) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise DureError(code, **params)

        real, commands.submit = commands.submit, refuse
        try:
            return s.ask("bcg", "POST", "/v1/jobs", JOB)
        finally:
            commands.submit = real

    return ask


def maintenance(s: Site) -> Any:
    s.story.phase(Phase.DRAINING)
    return s.ask("bcg", "POST", "/v1/jobs", JOB)


def limited(s: Site) -> Any:
    s.app.state.api.limiter._settings = type(GENEROUS)(read_burst=1, read_per_s=0.1)
    s.ask("ann", "GET", "/v1/me")
    return s.ask("ann", "GET", "/v1/me")


def large(s: Site) -> Any:
    return s.ask("bcg", "POST", "/v1/jobs", JOB | {"workdir": "x" * (1 << 21)})


def in_use(s: Site) -> Any:
    return s.edit("DELETE", "/v1/tiers/RTX4090")


def no_media(s: Site) -> Any:
    return s.ask("bcg", "POST", "/v1/jobs", content=b"a=1", headers={"Content-Type": "text/plain"})


def broken(s: Site) -> Any:
    @contextmanager
    def read() -> Iterator[Any]:
        raise ZeroDivisionError
        yield

    s.engine.store.read = read  # type: ignore[method-assign]
    return s.ask("", "GET", "/healthz")


CASES: dict[ErrorCode, Callable[[Site], Any]] = {
    C.INVALID_REQUEST: invalid,
    C.NO_FIT_PLACEMENT: no_fit,
    C.TIME_LIMIT_TOO_LONG: too_long,
    C.GPU_LIMIT: too_many_gpus,
    C.QUEUE_LIMIT: queue_full,
    C.NOT_FOUND: lambda s: s.ask("bcg", "GET", "/v1/jobs/77"),
    C.UNAUTHENTICATED: lambda s: s.ask("", "GET", "/v1/me"),
    C.FORBIDDEN: lambda s: s.ask("bcg", "PUT", "/v1/labs/BCG", {}),
    C.WRONG_STATE: wrong_state,
    C.ALREADY_ENDED: already_ended,
    C.IDEMPOTENCY_MISMATCH: mismatch,
    C.IDEMPOTENCY_IN_FLIGHT: raised(C.IDEMPOTENCY_IN_FLIGHT),
    C.PRECONDITION_REQUIRED: lambda s: s.ask("root", "PUT", "/v1/labs/BCG", {}),
    C.STALE_EDIT: lambda s: s.ask("root", "PUT", "/v1/labs/BCG", {}, headers={"If-Match": '"x-y"'}),
    C.SERVICE_MAINTENANCE: maintenance,
    C.RATE_LIMITED: limited,
    C.TOO_LARGE: large,
    C.IN_USE: in_use,
    C.METHOD_NOT_ALLOWED: lambda s: s.ask("bcg", "PATCH", "/v1/me", {}),
    C.UNSUPPORTED_MEDIA_TYPE: no_media,
    C.BAD_SETTING: raised(C.BAD_SETTING, key="k", value="v"),
    C.STORE_FAILED: raised(C.STORE_FAILED, reason="disk full"),
    C.INTERNAL: broken,
}


@pytest.mark.parametrize("code", ErrorCode)
@pytest.mark.parametrize("lang", ["en", "ko"])
def test_every_code_as_a_problem(code: ErrorCode, lang: str, tmp_path: Path) -> None:
    with site(tmp_path, policy=LIMITED) as here:
        here.client.headers["Accept-Language"] = lang
        answer = CASES[code](here)
        told = problem(answer, code.value, STATUS[code])
        assert answer.headers["content-language"] == lang
        assert any("가" <= c <= "힣" for c in told["detail"]) == (lang == "ko")


def test_internal_says_nothing_of_the_inside(here: Site) -> None:
    text = broken(here).text
    assert "ZeroDivision" not in text
    assert "Traceback" not in text


def test_no_fit_says_what_would(here: Site) -> None:
    told = problem(no_fit(here), "NO_FIT_PLACEMENT")
    assert told["failed_constraint"] == "min_vram_gb"
    assert told["nearest_placement"] == {"node": "gpu-1", "tier": "RTX4090"}
    assert told["nearest_requests"][0] == {"num_gpus": 1, "tier": "RTX4090", "min_vram_gb": 24}


def test_method_not_allowed_says_what_is(here: Site) -> None:
    assert "GET" in here.ask("bcg", "PATCH", "/v1/me", {}).headers["allow"]


DEEP = b'{"command":["a"],"labels":' + b'{"a":' * 100_000
BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"nul", 400),
    (b"{", 400),
    (b"\xff\xfe", 400),
    (b"\xef\xbb\xbf{}", 400),
    (b'{"command":["\xff"]}', 400),
    (b'{"command":["\\ud800"]}', 400),
    (b'{"command":["a"],"min_vram_gb":NaN}', 400),
    (b'{"command":["a"],"min_vram_gb":Infinity}', 400),
    (b'{"command":["a"]} x', 400),
    (b"[" * 200_000, 422),
    (DEEP, 422),
    (b"null", 422),
    (b"[]", 422),
    (b"{}", 422),
    (b'{"command":"a"}', 422),
    (b'{"command":[]}', 422),
    (b'{"command":[""]}', 422),
    (b'{"command":["a",1]}', 422),
    (b'{"command":["a\\u0000b"]}', 422),
    (b'{"command":["a"],"num_gpus":0}', 422),
    (b'{"command":["a"],"num_gpus":-1}', 422),
    (b'{"command":["a"],"num_gpus":9}', 422),
    (b'{"command":["a"],"num_gpus":1.5}', 422),
    (b'{"command":["a"],"num_gpus":"1"}', 422),
    (b'{"command":["a"],"num_gpus":true}', 422),
    (b'{"command":["a"],"num_gpus":' + b"9" * 500 + b"}", 422),
    (b'{"command":["a"],"num_gpus":' + b"9" * 100_000 + b"}", 422),
    (b'{"command":["a"],"min_vram_gb":1e999}', 422),
    (b'{"command":["a"],"min_vram_gb":-1}', 422),
    (b'{"command":["a"],"time_limit_s":0}', 422),
    (b'{"command":["a"],"not_before_ms":-5}', 422),
    (b'{"command":["a"],"not_before_ms":99999999999999999999}', 422),
    (b'{"command":["a"],"unknown":1}', 422),
    (b'{"command":["a"],"node":"a\\n"}', 422),
    (b'{"command":["a"],"node":"../x"}', 422),
    (b'{"command":["a"],"env":{"1A":"x"}}', 422),
    (b'{"command":["a"],"env":{"A":"x\\u0000"}}', 422),
    (b'{"command":["a"],"labels":{"a b":"x"}}', 422),
    (b'{"command":["a"],"retry":{"on":"always"}}', 422),
    (b'{"command":["a"],"retry":{"max":-1}}', 422),
    (b'{"command":["a"],"pre_stop_signal":{"signal":"KILL","before_s":1}}', 422),
    (b'{"command":["' + b"a" * 1_000_000 + b'"]}', 422),
    (b'{"command":["a"],"name":"' + b"a" * 1_000_000 + b'"}', 422),
    (b'{"command":[' + b'"a",' * 5000 + b'"a"]}', 422),
]


@pytest.mark.parametrize("number", range(len(BODIES)))
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/submit/preview"])
def test_bad_bodies(here: Site, number: int, path: str) -> None:
    body, status = BODIES[number]
    answer = here.ask(
        "bcg", "POST", path, content=body, headers={"Content-Type": "application/json"}
    )
    told = problem(answer, "INVALID_REQUEST", status)
    assert told["errors"]
    assert here.get("bcg", "/v1/jobs")["items"] == []


def test_later_of_two_equal_keys_counts(here: Site) -> None:
    body = b'{"command":["a"],"name":"x","name":"y"}'
    answer = here.ask(
        "bcg",
        "POST",
        "/v1/jobs",
        content=body,
        headers={"Content-Type": "application/json; charset=utf-8"},
    )
    assert answer.json()["name"] == "y"


def test_odd_but_valid_text_survives(here: Site) -> None:
    text = "한글 \U0001f600 \u202e \\ \" ' \n\t ; $(rm -rf /) <script>"
    job = here.submit(command=[text], name=text, labels={"a/b": text}, workdir="/tmp")
    told = here.get("bcg", f"/v1/jobs/{job}")
    assert told["name"] == text
    assert told["command"] == [text]
    assert told["labels"] == {"a/b": text}


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (b'{"command":["a",1]}', "/command/1"),
        (b'{"command":["a"],"retry":{"on":"x"}}', "/retry/on"),
        (b'{"command":["a"],"retry":{"x/y":1}}', "/retry/x~1y"),
        (b'{"command":["a"],"zz":1}', "/zz"),
        (b"{}", "/command"),
        (b"[]", ""),
        (b'{"command":["a"],"env":{"A":1}}', "/env"),
        (b'{"command":["a"],"env":{"1":"x"}}', "/env"),
        (b'{"command":[""]}', "/command/0"),
    ],
)
def test_pointers(here: Site, body: bytes, pointer: str) -> None:
    answer = here.ask(
        "bcg", "POST", "/v1/jobs", content=body, headers={"Content-Type": "application/json"}
    )
    assert problem(answer, "INVALID_REQUEST", 422)["errors"][0]["pointer"] == pointer


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=201",
        "limit=x",
        "limit=",
        "limit=1&limit=2",
        "limit=%D9%A3",
        "state=X",
        "mine=maybe",
        "zz=1",
        "user=%00",
        "since_ms=-1",
        "cursor=%00",
        "cursor=xx",
        "cursor=" + "A" * 300,
        "since_ms=99999999999999999999999",
        "name=%00",
        "&".join(f"a{i}=1" for i in range(300)),
        "user=" + "a" * 5000,
    ],
)
def test_bad_queries(here: Site, query: str) -> None:
    answer = here.ask("bcg", "GET", f"/v1/jobs?{query}")
    told = problem(answer, "INVALID_REQUEST")
    assert answer.status_code in (400, 422)
    assert told["errors"][0]["pointer"].startswith("?")


def test_cursor_of_another_list_is_refused(here: Site) -> None:
    for i in range(3):
        here.submit(name=str(i))
    cursor = here.get("bcg", "/v1/jobs?limit=1")["next"]
    for path in ("/v1/queue", "/v1/jobs/1/events", "/v1/labs/BCG/usage"):
        problem(here.ask("bcg", "GET", f"{path}?cursor={cursor}"), "INVALID_REQUEST", 422)


@pytest.mark.parametrize(
    "job",
    [
        "0x1",
        "-1",
        "1.0",
        "%00",
        "a",
        "9" * 18,
        "9" * 19,
        "9" * 400,
        "%F0%9F%98%80",
        "1%0A",
        "%D9%A1",
    ],
)
@pytest.mark.parametrize("suffix", ["", "/why", "/events", "/attempts", "/logs"])
def test_unknown_jobs(here: Site, job: str, suffix: str) -> None:
    problem(here.ask("bcg", "GET", f"/v1/jobs/{job}{suffix}"), "NOT_FOUND", 404)


@pytest.mark.parametrize("name", ["%00", "a%0A", "..%2f", "a%20b", "%EA%B0%80", "x" * 100])
def test_odd_names(here: Site, name: str) -> None:
    for path in ("labs", "tiers", "nodes"):
        problem(here.ask("bcg", "GET", f"/v1/{path}/{name}"), "NOT_FOUND", 404)
    answer = here.ask("root", "PUT", f"/v1/labs/{name}", {})
    assert answer.status_code in (404, 422)


def test_unknown_things(here: Site) -> None:
    problem(here.ask("bcg", "PUT", "/v1/me/queue", {"jobs": [5]}), "NOT_FOUND", 404)
    job = here.submit(hold=True)
    problem(here.ask("bcg", "PUT", "/v1/me/queue", {"jobs": [job, job]}), "INVALID_REQUEST", 422)
    problem(here.ask("bcg", "DELETE", "/v1/tokens/ab"), "NOT_FOUND", 404)
    problem(here.ask("root", "DELETE", "/v1/tokens/nosuchtoken"), "NOT_FOUND", 404)
    problem(here.ask("root", "POST", "/v1/tokens", {"user": "ghost"}), "NOT_FOUND", 404)
    problem(
        here.ask("root", "PATCH", "/v1/nodes/ghost", {}, headers={"If-Match": "*"}), "NOT_FOUND"
    )
    problem(here.ask("root", "DELETE", "/v1/tiers/ghost", headers={"If-Match": "*"}), "NOT_FOUND")
    problem(here.ask("root", "POST", "/v1/jobs", JOB | {"lab": "GHOST"}), "NOT_FOUND", 404)
    problem(here.ask("root", "GET", "/v1/labs/GHOST/usage"), "NOT_FOUND", 404)
    problem(here.ask("root", "PUT", "/v1/maintenance", {"phase": "ACTIVE"}), "WRONG_STATE", 409)
    problem(here.ask("", "GET", "/"), "NOT_FOUND", 404)


def test_missing_media_type(here: Site) -> None:
    answer = here.ask("bcg", "POST", "/v1/jobs", content=b'{"command":["a"]}')
    problem(answer, "UNSUPPORTED_MEDIA_TYPE", 415)


def test_body_limit_holds_without_a_length(here: Site) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 65_536

    headers = {"Content-Type": "application/json"}
    problem(
        here.ask("bcg", "POST", "/v1/jobs", content=endless(), headers=headers), "TOO_LARGE", 413
    )


def test_languages() -> None:
    assert language("ko-KR,ko;q=0.9,en;q=0.8", "en") == "ko"
    assert language("en;q=0.2, ko;q=0.1", "ko") == "en"
    assert language("fr", "ko") == "ko"
    assert language("ko;q=nan, en;q=inf, ko;q=-1", "en") == "en"
    assert language("," * 5000, "en") == "en"


def test_field_errors_of_any_text() -> None:
    assert field_error("anything at all").pointer == ""
    assert field_error("x - at `$`").pointer == ""
    assert field_error("x - at `$[0].a[...]`").pointer == "/0/a"
    assert field_error("Expected - at `$.limit`", "?").pointer == "?limit"


def test_recursion_is_a_400() -> None:
    found = problems.unreadable(RecursionError())
    assert isinstance(found, Unreadable)
    assert found.status == 400
