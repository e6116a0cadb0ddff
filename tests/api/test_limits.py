"""Token buckets in virtual time, idempotent submits, the maintenance gate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dure.api import limits
from dure.api.limits import Limiter, Rate
from dure.core.errors import DureError
from dure.core.model import Phase
from dure.settings import LimitsSettings
from tests.api.site import JOB, Site, problem, site

TIGHT = LimitsSettings(read_per_s=2, read_burst=4, submit_per_min=6, streams=1)


def test_reads_are_limited_per_token() -> None:
    with site(limits=TIGHT) as here:
        for left in (3, 2, 1, 0):
            answer = here.ask("bcg", "GET", "/v1/me")
            assert answer.status_code == 200
            assert answer.headers["ratelimit"].startswith(f'"read";r={left};')
        assert answer.headers["ratelimit-policy"] == '"read";q=4;w=2'
        refused = here.ask("bcg", "GET", "/v1/me")
        problem(refused, "RATE_LIMITED", 429)
        assert refused.headers["retry-after"] == "1"
        assert here.ask("vis", "GET", "/v1/me").status_code == 200
        here.clock.advance(0.5)
        assert here.ask("bcg", "GET", "/v1/me").status_code == 200
        problem(here.ask("bcg", "GET", "/v1/me"), "RATE_LIMITED", 429)
        here.clock.advance(3600)
        assert [here.ask("bcg", "GET", "/v1/me").status_code for _ in range(5)] == [200] * 4 + [429]


def test_submits_are_counted_apart() -> None:
    with site(limits=TIGHT) as here:
        codes = [here.ask("bcg", "POST", "/v1/jobs", JOB).status_code for _ in range(7)]
        assert codes == [201] * 6 + [429]
        assert here.ask("bcg", "POST", "/v1/jobs", JOB).headers["retry-after"] == "10"
        assert here.ask("bcg", "GET", "/v1/me").status_code == 200
        here.clock.advance(10)
        assert here.ask("bcg", "POST", "/v1/jobs", JOB).status_code == 201


def test_anonymous_callers_and_guessers_are_limited_by_address() -> None:
    with site(limits=TIGHT) as here:
        assert [here.ask("", "GET", "/healthz").status_code for _ in range(5)] == [200] * 4 + [429]
        guess = {"Authorization": "Bearer dure_pat_guess"}
        problem(here.client.get("/v1/me", headers=guess), "RATE_LIMITED", 429)
        assert here.ask("bcg", "GET", "/v1/me").status_code == 200


def test_a_clock_that_steps_back_gives_nothing() -> None:
    limiter = Limiter(TIGHT)
    for _ in range(4):
        limiter.take("a", Rate.READ, 10_000)
    with pytest.raises(DureError):
        limiter.take("a", Rate.READ, 0)
    with pytest.raises(DureError):
        limiter.take("a", Rate.READ, 10_100)


def test_buckets_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_KEYS", 10)
    limiter = Limiter(TIGHT)
    for i in range(100):
        limiter.take(str(i), Rate.READ, 0)
    assert len(limiter._buckets) <= 10
    limiter.take("new", Rate.READ, 10**6)
    assert len(limiter._buckets) <= 10


def test_streams_are_counted() -> None:
    limiter = Limiter(TIGHT)
    limiter.open_stream("a")
    limiter.open_stream("b")
    with pytest.raises(DureError):
        limiter.open_stream("a")
    limiter.close_stream("a")
    limiter.open_stream("a")


# -- idempotency ---------------------------------------------------------------------


def test_same_key_twenty_times_at_once_makes_one_job(here: Site) -> None:
    def submit(_: int) -> tuple[int, int, bool]:
        answer = here.ask("bcg", "POST", "/v1/jobs", JOB, headers={"Idempotency-Key": "abc"})
        replayed = answer.headers.get("idempotency-replayed") == "true"
        return answer.status_code, answer.json()["id"], replayed

    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(submit, range(20)))
    assert {(code, job) for code, job, _ in answers} == {(201, 1)}
    assert sum(replayed for _, _, replayed in answers) == 19
    assert len(here.get("bcg", "/v1/jobs")["items"]) == 1


def test_keys_belong_to_a_person_and_a_request(here: Site) -> None:
    key = {"Idempotency-Key": "abc"}
    one = here.ask("bcg", "POST", "/v1/jobs", JOB, headers=key).json()["id"]
    assert here.ask("ann", "POST", "/v1/jobs", JOB, headers=key).json()["id"] != one
    problem(
        here.ask("bcg", "POST", "/v1/jobs", JOB | {"hold": True}, headers=key),
        "IDEMPOTENCY_MISMATCH",
        422,
    )
    again = here.ask("bcg", "POST", f"/v1/jobs/{one}/rerun", headers={"Idempotency-Key": "r"})
    assert (
        again.json()["id"]
        == here.ask(
            "bcg", "POST", f"/v1/jobs/{one}/rerun", headers={"Idempotency-Key": "r"}
        ).json()["id"]
    )


def test_a_replay_passes_the_maintenance_gate(here: Site) -> None:
    key = {"Idempotency-Key": "abc"}
    one = here.ask("bcg", "POST", "/v1/jobs", JOB, headers=key).json()["id"]
    here.story.phase(Phase.DRAINING)
    assert here.ask("bcg", "POST", "/v1/jobs", JOB, headers=key).json()["id"] == one


@pytest.mark.parametrize("key", ["x" * 201, "a b", "a\tb"])
def test_unusable_keys(here: Site, key: str) -> None:
    told = problem(
        here.ask("bcg", "POST", "/v1/jobs", JOB, headers={"Idempotency-Key": key}),
        "INVALID_REQUEST",
        422,
    )
    assert told["errors"][0]["pointer"] == "Idempotency-Key:"


# -- maintenance ---------------------------------------------------------------------

WORK = [
    "POST /v1/jobs",
    "POST /v1/jobs/H/release",
    "POST /v1/jobs/H/hold",
    "POST /v1/jobs/H/retry",
    "POST /v1/jobs/H/rerun",
    "PATCH /v1/jobs/H",
    "PUT /v1/me/queue",
]


@pytest.mark.parametrize("phase", list(Phase))
def test_maintenance_gate(here: Site, phase: Phase) -> None:
    held, running = here.submit(hold=True), here.submit()
    with here.engine.change("admin") as work:
        work.tx.put_phase(phase)
    here.engine.world.phase = phase
    assert here.get("", "/v1/maintenance/status") == {"phase": phase.value}
    for line in WORK:
        method, path = line.split()
        body = {
            "POST /v1/jobs": JOB,
            "PATCH /v1/jobs/H": {},
            "PUT /v1/me/queue": {"jobs": [held]},
        }.get(line)
        answer = here.ask("bcg", method, path.replace("H", str(held)), body)
        if phase is Phase.NORMAL:
            assert answer.status_code in (200, 201, 409), line
        else:
            problem(answer, "SERVICE_MAINTENANCE", 503)
    cancel = here.ask("bcg", "POST", f"/v1/jobs/{running}/cancel")
    assert cancel.status_code == (200 if phase in (Phase.NORMAL, Phase.DRAINING) else 503)
    for path in ("/v1/queue", "/v1/pool", f"/v1/jobs/{held}/why", "/v1/jobs"):
        assert here.ask("bcg", "GET", path).status_code == 200
    assert here.ask("bcg", "POST", "/v1/submit/preview", JOB).json()["starts_now"] == (
        phase is Phase.NORMAL
    )
    assert here.ask("bcg", "POST", "/v1/tokens", {}).status_code == 201
    assert here.edit("PUT", "/v1/labs/BCG", {"weight": 2}).status_code == 200
    assert here.ask("root", "PUT", "/v1/maintenance", {"phase": "NORMAL"}).json() == {
        "phase": "NORMAL"
    }


def test_maintenance_goes_its_way(here: Site) -> None:
    assert here.ask("root", "PUT", "/v1/maintenance", {"phase": "DRAINING"}).status_code == 200
    for _ in range(3):
        here.story.settle()
    assert here.get("", "/v1/maintenance/status") == {"phase": "ACTIVE"}
    problem(here.ask("root", "PUT", "/v1/maintenance", {"phase": "DRAINING"}), "WRONG_STATE", 409)
