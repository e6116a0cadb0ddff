"""Readers while the scheduler works: no deadlock, no half-seen state, no 5xx."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dure.adapters.compute.simulated import SimRun
from tests.api.site import JOB, Site

PATHS = (
    "/v1/queue",
    "/v1/pool",
    "/v1/jobs",
    "/v1/me/queue",
    "/v1/labs",
    "/v1/jobs/1/why",
    "/v1/jobs/1",
)


def test_reading_while_jobs_come_and_go(here: Site) -> None:
    here.runs["train"] = SimRun(run_ms=2000)
    here.submit()

    def look(number: int) -> int:
        if number % 8 == 7:
            return here.ask("bcg", "POST", "/v1/submit/preview", JOB).status_code
        answer = here.ask("bcg", "GET", PATHS[number % 8])
        check(PATHS[number % 8], answer.json())
        return answer.status_code

    def check(path: str, told: Any) -> None:
        if path == "/v1/queue":
            ranks = [r["rank"] for r in told["items"] if r["rank"] is not None]
            assert ranks == list(range(1, len(ranks) + 1))
            assert all(r["job"] < 1 << 60 for r in told["items"]), "an imagined job was seen"
        if path == "/v1/pool":
            for tier in told["tiers"]:
                assert tier["run"] + tier["reserved"] + tier["idle"] + tier["down"] == 2

    with ThreadPoolExecutor(6) as threads:
        looks = threads.map(look, range(240))
        for _ in range(30):
            here.submit(settle=False)
            here.story.wait(0.5)
        assert set(looks) == {200}
    here.story.wait(60)
    here.story.check()
