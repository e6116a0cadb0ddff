"""ETags: 304 while nothing happens, no lost edits, no edit that goes stale by itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dure.api.app import table
from tests.api.site import Site, problem

GETS = [r for r in table() if r.method == "GET" and r.out is not str]


@pytest.mark.parametrize("route", GETS, ids=lambda r: r.name)
def test_every_get_has_a_tag_and_304(here: Site, route: object) -> None:
    job = here.submit("bcg")
    here.submit("bcg", hold=True)
    path = route.path.format(
        job=job, tier="RTX4090", node="gpu-1", lab="BCG", user="ann", token="x"
    )
    first = here.ask("root", "GET", path)
    assert first.status_code == 200
    again = here.ask("root", "GET", path, headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""
    assert again.headers["etag"] == first.headers["etag"]
    other = here.ask("root", "GET", path, headers={"If-None-Match": '"a", W/"b"'})
    assert other.status_code == 200
    assert here.ask("root", "GET", path, headers={"If-None-Match": "*"}).status_code == 304


@pytest.mark.parametrize("path", ["/v1/queue", "/v1/pool", "/v1/labs", "/v1/labs/VIS/usage"])
def test_time_alone_changes_no_tag_but_events_do(here: Site, path: str) -> None:
    for _ in range(5):
        here.submit("bcg")
    tag = here.ask("root", "GET", path).headers["etag"]
    here.clock.advance(30)
    assert here.ask("root", "GET", path).headers["etag"] == tag
    here.story.settle()
    assert here.ask("root", "GET", path).headers["etag"] == tag
    for job in (1, 5):
        here.ask("root", "POST", f"/v1/jobs/{job}/cancel")
    here.story.settle()
    if path == "/v1/labs/VIS/usage":
        here.edit("PUT", "/v1/labs/VIS", {"opening_tflop_s": 1})
    assert here.ask("root", "GET", path).headers["etag"] != tag


def test_a_name_cannot_hide_a_change(here: Site) -> None:
    job = here.submit(name='","as_of_ms":1', hold=True)
    path = f"/v1/jobs/{job}"
    tag = here.ask("bcg", "GET", path).headers["etag"]
    here.ask("bcg", "PATCH", path, {"name": '","as_of_ms":2'})
    assert here.ask("bcg", "GET", path).headers["etag"] != tag


EDITS = [
    ("PUT", "/v1/tiers/RTX4090", {"vram_gb": 24, "tflops": 80}, {"vram_gb": 24, "tflops": 81}),
    ("PUT", "/v1/labs/BCG", {"weight": 2}, {"weight": 3}),
    ("PUT", "/v1/users/ann", {"lab": "VIS"}, {"lab": "BCG", "active": False}),
    ("PATCH", "/v1/nodes/gpu-1", {"drained": True}, {"drained": False}),
]


@pytest.mark.parametrize(("method", "path", "one", "two"), EDITS)
def test_if_match(here: Site, method: str, path: str, one: object, two: object) -> None:
    problem(here.ask("root", method, path, one), "PRECONDITION_REQUIRED", 428)
    seen = here.etag(path)
    first = here.ask("root", method, path, one, headers={"If-Match": seen})
    assert first.status_code == 200
    assert first.headers["etag"] == here.etag(path)
    problem(here.ask("root", method, path, two, headers={"If-Match": seen}), "STALE_EDIT", 412)
    both = f"{seen}, {first.headers['etag']}"
    assert here.ask("root", method, path, two, headers={"If-Match": both}).status_code == 200
    assert here.ask("root", method, path, one, headers={"If-Match": "*"}).status_code == 200


@pytest.mark.parametrize(("method", "path", "one", "two"), EDITS)
def test_an_edit_does_not_go_stale_by_itself(
    here: Site, method: str, path: str, one: object, two: object
) -> None:
    here.edit("PUT", "/v1/labs/BCG", {"opening_tflop_s": 5})
    seen = here.etag(path)
    here.submit("ann")
    here.clock.advance(86_400)
    here.story.settle()
    assert here.ask("root", method, path, one, headers={"If-Match": seen}).status_code == 200


def test_creating_needs_no_tag_and_cannot_overwrite(here: Site) -> None:
    body = {"vram_gb": 8, "tflops": 1}
    problem(
        here.ask("root", "PUT", "/v1/tiers/N", body, headers={"If-Match": '"a-b"'}), "STALE_EDIT"
    )
    new = {"If-None-Match": "*"}
    assert here.ask("root", "PUT", "/v1/tiers/N", body, headers=new).status_code == 200
    problem(here.ask("root", "PUT", "/v1/tiers/N", body, headers=new), "STALE_EDIT", 412)
    problem(here.ask("root", "DELETE", "/v1/tiers/N"), "PRECONDITION_REQUIRED", 428)
    problem(
        here.ask("root", "DELETE", "/v1/tiers/N", headers={"If-Match": '"x"'}), "STALE_EDIT", 412
    )


def test_of_many_edits_from_one_reading_one_is_kept(here: Site) -> None:
    seen = here.etag("/v1/labs/BCG")

    def edit(weight: int) -> int:
        return here.ask(
            "root", "PUT", "/v1/labs/BCG", {"weight": weight}, headers={"If-Match": seen}
        ).status_code

    with ThreadPoolExecutor(8) as threads:
        codes = list(threads.map(edit, range(2, 18)))
    assert sorted(codes) == [200] + [412] * 15
