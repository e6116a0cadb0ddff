"""What each route answers when all is well."""

from __future__ import annotations

import msgspec
import pytest

from dure import wire
from dure.adapters.compute.simulated import SimRun
from dure.core.model import Evidence, Gpu, NodeHealth
from dure.core.policy import Policy
from tests.api.site import JOB, Site, problem, site


def test_submit_fills_in_name_and_lab(here: Site) -> None:
    answer = here.ask("bcg", "POST", "/v1/jobs", {"command": ["/opt/bin/train.py", "--lr", "1"]})
    job = msgspec.convert(answer.json(), wire.JobOut)
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/jobs/{job.id}"
    assert (job.name, job.lab, job.user) == ("train.py", "BCG", "bcg")
    assert job.state_text == "Waiting"
    assert here.get("bcg", f"/v1/jobs/{job.id}")["id"] == job.id


def test_sentences_follow_accept_language(here: Site) -> None:
    job = here.submit(hold=True)
    for header, word in (
        ("ko", "개인 대기"),
        ("de, ko;q=0.5, en;q=0.1", "개인 대기"),
        ("en-GB", "Personal queue"),
        ("", "Personal queue"),
        ("*;q=x", "Personal queue"),
    ):
        answer = here.ask("bcg", "GET", f"/v1/jobs/{job}", headers={"Accept-Language": header})
        assert answer.json()["state_text"] == word
    why = here.get("bcg", f"/v1/jobs/{job}/why", headers={"Accept-Language": "ko"})
    assert why["reason"]["code"] == "HELD"
    assert "보류" in why["reason"]["text"]


def test_life_of_a_job(here: Site) -> None:
    here.runs["train"] = SimRun(run_ms=90_000)
    job = here.submit()
    running = here.get("bcg", f"/v1/jobs/{job}")
    assert running["placement"] == {
        "node": "gpu-1",
        "tier": "RTX4090",
        "gpus": [0],
        "simulated": False,
    }
    assert running["output_dir"] == f"/out/{job}.1"
    here.story.wait(91)
    done = here.get("bcg", f"/v1/jobs/{job}")
    assert done["state"] == "COMPLETED"
    assert done["exit_code"] == 0
    # 90 s x 82.6 TFLOPS, exactly.
    assert done["charge"] == {
        "total_tflop_s": "7434",
        "run_tflop_s": "7434",
        "reserved_tflop_s": "0",
        "written_off_gpu_s": "0",
    }
    (attempt,) = here.get("bcg", f"/v1/jobs/{job}/attempts")["items"]
    assert attempt["outcome"] == "completed"
    assert attempt["ended_ms"] - attempt["started_ms"] == 90_000
    events = here.get("bcg", f"/v1/jobs/{job}/events")["items"]
    assert [e["name"] for e in events][:3] == ["job.submitted", "job.promoted", "job.dispatched"]
    assert events[2]["text"] == "sent to gpu-1 (RTX4090 × 1)"
    usage = here.get("bcg", "/v1/labs/BCG/usage")
    assert usage["charged_tflop_s"] == usage["run_tflop_s"] == "7434"
    assert usage["lines"][0]["job"] == job
    assert usage["lines"][0]["cost_tflop_s"] == "7434"


def test_cancel_shows_both_clocks(here: Site) -> None:
    here.runs["train"] = SimRun(run_ms=10**7, save_ms=10_000)
    job = here.submit()
    told = here.ask("bcg", "POST", f"/v1/jobs/{job}/cancel").json()
    asked = here.clock.now_ms()
    assert told["state"] == "CANCELLING"
    assert told["cancel"] == {
        "asked_ms": asked,
        "checkpoint_until_ms": asked + 30_000,
        "kill_at_ms": asked + 300_000,
    }
    gpu = here.get("vis", "/v1/nodes/gpu-1")["gpus"][0]
    assert (gpu["state"], gpu["job"], gpu["lab"]) == ("ending", job, "BCG")
    here.story.wait(11)
    assert here.get("bcg", f"/v1/jobs/{job}")["state"] == "CANCELLED"
    problem(here.ask("bcg", "POST", f"/v1/jobs/{job}/cancel"), "ALREADY_ENDED", 409)


def test_failed_job_says_why_and_can_be_retried_and_rerun(here: Site) -> None:
    here.runs["train"] = SimRun(run_ms=1000, evidence=Evidence(exit_code=3, stderr_tail="boom"))
    job = here.submit()
    here.story.wait(2)
    told = here.get("bcg", f"/v1/jobs/{job}")
    assert told["state"] == "FAILED"
    assert told["error"]["code"] == "EXIT_NONZERO"
    assert told["error"]["text"]
    assert here.get("bcg", f"/v1/jobs/{job}/attempts")["items"][0]["stderr_tail"] == "boom"
    assert here.ask("bcg", "POST", f"/v1/jobs/{job}/retry").json()["id"] == job
    again = here.ask("bcg", "POST", f"/v1/jobs/{job}/rerun")
    assert again.status_code == 201
    assert again.json()["id"] != job


def test_hold_release_edit_reorder(here: Site) -> None:
    late = here.clock.now_ms() + 10**7
    a, b = (here.submit(not_before_ms=late, name=n) for n in "ab")
    assert here.ask("bcg", "POST", f"/v1/jobs/{a}/hold").json()["held"]
    mine = here.get("bcg", "/v1/me/queue")
    assert [r["job"] for r in mine["items"]] == [a, b]
    assert mine["items"][0]["reason"]["code"] == "HELD"
    assert mine["items"][1]["reason"]["code"] == "NOT_BEFORE"
    # The sentence has a time of day, the parameters the number.
    assert "UTC" in mine["items"][1]["reason"]["text"]
    assert mine["items"][1]["reason"]["params"] == {"until_ms": late}
    moved = here.ask("bcg", "PUT", "/v1/me/queue", {"jobs": [b]}).json()
    assert [r["job"] for r in moved["items"]] == [b, a]
    assert not here.ask("bcg", "POST", f"/v1/jobs/{a}/release").json()["held"]
    patch = {
        "name": "",
        "num_gpus": 2,
        "tiers": ["RTX4090"],
        "node": "gpu-1",
        "time_limit_s": 60,
        "not_before_ms": 0,
        "min_vram_gb": 3.5,
    }
    edited = here.ask("bcg", "PATCH", f"/v1/jobs/{a}", patch).json()
    assert (edited["name"], edited["num_gpus"], edited["tiers"]) == ("train", 2, ["RTX4090"])
    cleared = here.ask("bcg", "PATCH", f"/v1/jobs/{b}", {"node": None, "time_limit_s": None}).json()
    assert cleared["node"] is None


def test_lists_page_with_opaque_cursors(here: Site) -> None:
    ids = [here.submit("bcg", settle=False) for _ in range(5)]
    seen: list[int] = []
    answer = here.ask("bcg", "GET", "/v1/jobs?limit=2&lab=BCG")
    while True:
        seen += [j["id"] for j in answer.json()["items"]]
        if "link" not in answer.headers:
            break
        path, rel = answer.headers["link"].split(";")
        assert rel.strip() == 'rel="next"'
        answer = here.ask("bcg", "GET", path.strip("<>"))
        assert answer.status_code == 200
    assert seen == ids[::-1]
    assert answer.json()["next"] is None
    events = here.ask("bcg", "GET", f"/v1/jobs/{ids[0]}/events?limit=1")
    rest = here.get("bcg", f"/v1/jobs/{ids[0]}/events?cursor={events.json()['next']}")
    assert events.json()["items"][0]["name"] == "job.submitted"
    assert rest["items"][0]["name"] == "job.promoted"


def test_filters(here: Site) -> None:
    mine, hers = here.submit("bcg", name="x"), here.submit("ann", hold=True)

    def found(query: str) -> list[int]:
        return [j["id"] for j in here.get("ann", f"/v1/jobs?{query}")["items"]]

    assert found("mine=true") == [hers]
    assert found("user=bcg") == [mine]
    assert found("name=x") == [mine]
    assert found("state=RUNNING&state=PERSONAL_QUEUE_WAIT") == [hers, mine]
    assert found("state=DEAD") == []
    assert found(f"since_ms={here.clock.now_ms() + 1}") == []
    assert found("lab=BCG") == [hers, mine]


def test_queue_shows_ranks_reasons_and_the_unranked(here: Site) -> None:
    ids = [here.submit("bcg", name=f"j{i}") for i in range(7)]
    other = here.submit("vis", name="v")
    here.story.node("gpu-2", health=NodeHealth.OFFLINE)
    absent = here.submit("bcg", name="absent", tiers=["RTX3080Ti"])
    line = here.get("vis", "/v1/queue")
    assert [r["job"] for r in line["items"]][: len(ids) - 4] == ids[4:]
    assert [r["rank"] for r in line["items"]] == [1, 2, 3, 4, None]
    assert line["items"][3]["job"] == other
    assert line["items"][-1]["job"] == absent
    assert line["items"][-1]["reason"]["code"] == "NODE_OFFLINE"
    assert line["items"][0]["reason"]["code"] == "NO_FREE_GPU"
    assert line["items"][1]["reason"]["text"]
    assert line["node_wait"] == 1
    assert [x["lab"] for x in line["labs"]] == ["BCG", "VIS"]
    assert [x["waiting"] for x in line["labs"]] == [4, 1]
    paged, cursor = [], ""
    while cursor is not None:
        page = here.get("vis", f"/v1/queue?limit=2{cursor and '&cursor=' + cursor}")
        paged += page["items"]
        cursor = page["next"]
    assert [(r["job"], r["rank"]) for r in paged] == [(r["job"], r["rank"]) for r in line["items"]]
    why = here.get("bcg", f"/v1/jobs/{ids[5]}/why")
    assert why["rank"] == 2
    assert why["reason"]["code"] == "SAME_LAB_BEHIND"
    assert {p["node"] for p in why["placements"]} == {"gpu-1", "gpu-2"}
    waits = here.get("bcg", f"/v1/jobs/{absent}/why")
    assert [r["code"] for r in (waits["reason"], *waits["more"])] == ["NODE_OFFLINE", "NODE_WAIT"]
    here.clock.advance(3700)
    waits = here.get("bcg", f"/v1/jobs/{absent}/why")
    here.story.settle()
    assert here.get("bcg", "/v1/queue")["personal"] == 0


def test_personal_queue_counts(here: Site) -> None:
    with site(policy=Policy(slots_per_user=1)) as small:
        for _ in range(3):
            small.submit("bcg")
        mine = small.get("bcg", "/v1/me/queue")
        assert (mine["slots_used"], mine["slots_limit"]) == (1, 1)
        assert mine["items"][0]["reason"]["code"] == "PERSONAL_LIMIT"
        assert small.get("vis", "/v1/queue")["personal"] == 2


def test_pool_counts_every_gpu_once(here: Site) -> None:
    here.submit("bcg", tiers=["RTX4090"])
    waits = here.submit("bcg", num_gpus=2, tiers=["RTX4090"], name="two")
    held = here.get("bcg", f"/v1/jobs/{waits}")
    assert held["reservation"]["count"] == 1
    node = here.engine.world.pool.nodes["gpu-2"]
    sick = Gpu(index=0, tier="RTX3080Ti", healthy=False)
    here.story.node(
        "gpu-2", gpus=(sick, Gpu(index=1, tier="RTX3080Ti", foreign=True, simulated=True))
    )
    pool = here.get("vis", "/v1/pool")
    gpus = {n["name"]: [g["state"] for g in n["gpus"]] for n in pool["nodes"]}
    assert gpus == {"gpu-1": ["run", "reserved"], "gpu-2": ["sick", "foreign"]}
    best, second = pool["tiers"]
    assert (best["name"], best["run"], best["reserved"], best["idle"], best["down"]) == (
        "RTX4090",
        1,
        1,
        0,
        0,
    )
    assert (second["down"], second["start_now"], second["simulated"]) == (2, 0, True)
    here.story.node("gpu-2", gpus=node.gpus, drained=True)
    assert {g["state"] for g in here.get("vis", "/v1/nodes/gpu-2")["gpus"]} == {"drained"}
    here.story.node("gpu-2", drained=False, health=NodeHealth.OFFLINE)
    assert {g["state"] for g in here.get("vis", "/v1/nodes/gpu-2")["gpus"]} == {"off"}
    here.story.node("gpu-2", health=NodeHealth.STABLE)
    assert here.get("vis", "/v1/pool")["tiers"][1]["start_now"] == 2


def test_pool_says_when_the_next_gpu_is_free(here: Site) -> None:
    here.submit("bcg", time_limit_s=600)
    tier = here.get("bcg", "/v1/pool")["tiers"][0]
    assert tier["next_free_ms"] == here.clock.now_ms() + 600_000


def test_preview_asks_the_planner_and_changes_nothing(here: Site) -> None:
    before = here.engine.world.last_event_id, len(here.engine.world.index)
    free = here.ask("bcg", "POST", "/v1/submit/preview", JOB).json()
    assert free["starts_now"]
    assert free["ahead"] == 0
    assert free["cost_per_hour_tflop_s"] == {"RTX3080Ti": "122760", "RTX4090": "297360"}
    assert not here.ask("bcg", "POST", "/v1/submit/preview", JOB | {"hold": True}).json()[
        "starts_now"
    ]
    assert before == (here.engine.world.last_event_id, len(here.engine.world.index))
    for _ in range(6):
        here.submit("bcg")
    full = here.ask("bcg", "POST", "/v1/submit/preview", JOB).json()
    assert not full["starts_now"]
    assert full["ahead"] == 2
    # VIS has used more than BCG, so it stands behind; root sees the same line for BCG.
    assert here.ask("vis", "POST", "/v1/submit/preview", JOB).json()["ahead"] == 2
    assert [r["job"] for r in here.get("bcg", "/v1/queue")["items"]] == [5, 6]


def test_preview_refuses_what_submit_refuses(here: Site) -> None:
    told = problem(
        here.ask("bcg", "POST", "/v1/submit/preview", JOB | {"num_gpus": 8}), "NO_FIT_PLACEMENT"
    )
    assert told["nearest_requests"][0]["num_gpus"] == 2
    problem(here.ask("bcg", "POST", "/v1/submit/preview", JOB | {"lab": "VIS"}), "FORBIDDEN")


def test_labs_users_usage(here: Site) -> None:
    told = here.edit(
        "PUT",
        "/v1/labs/BCG",
        {"title": "Bio", "weight": 2, "limits": {"slots": 3}, "opening_tflop_s": 1.5},
    ).json()
    assert (told["title"], told["weight"], told["limits"]["slots"], told["usage_tflop_s"]) == (
        "Bio",
        2,
        3,
        "1.5",
    )
    usage = here.get("bcg", "/v1/labs/BCG/usage")
    assert (usage["opening_tflop_s"], usage["charged_tflop_s"]) == ("1.5", "1.5")
    here.clock.advance(604_800)
    assert here.get("vis", "/v1/labs/BCG")["usage_tflop_s"] == "0.75"
    assert [x["name"] for x in here.get("vis", "/v1/labs")["items"]] == ["BCG", "VIS"]
    made = here.ask("root", "PUT", "/v1/users/new", {"lab": "VIS", "limits": {"slots": 7}})
    assert made.json()["slots_limit"] == 7
    problem(here.ask("root", "PUT", "/v1/users/new2", {"lab": "NONE"}), "NOT_FOUND")
    here.edit("PUT", "/v1/labs/BCG", {"opening_tflop_s": 2})
    here.edit("PUT", "/v1/labs/BCG", {"opening_tflop_s": 3})
    first = here.get("bcg", "/v1/labs/BCG/usage?limit=2")
    rest = here.get("bcg", f"/v1/labs/BCG/usage?limit=2&cursor={first['next']}")
    assert [x["cost_tflop_s"] for x in first["lines"] + rest["lines"]] == ["3", "2", "1.5"]
    assert rest["next"] is None


def test_tiers_and_nodes(here: Site) -> None:
    made = here.ask(
        "root", "PUT", "/v1/tiers/H200", {"vram_gb": 141, "tflops": 989.5, "sort_order": 99}
    )
    assert made.json()["tflops"] == 989.5
    assert here.get("bcg", "/v1/tiers")["items"][0]["name"] == "H200"
    assert here.edit("DELETE", "/v1/tiers/H200").status_code == 204
    problem(here.ask("bcg", "GET", "/v1/tiers/H200"), "NOT_FOUND")
    drained = here.edit("PATCH", "/v1/nodes/gpu-1", {"drained": True, "drain_reason": "fan"}).json()
    assert (drained["drained"], drained["drain_reason"]) == (True, "fan")
    kept = here.edit("PATCH", "/v1/nodes/gpu-1", {"drain_reason": "fans"}).json()
    assert (kept["drained"], kept["drain_reason"]) == (True, "fans")


def test_forced_drain_stops_what_runs(here: Site) -> None:
    job = here.submit("bcg")
    here.edit("PATCH", "/v1/nodes/gpu-1", {"drained": True, "force": True})
    here.story.settle()
    assert here.get("bcg", f"/v1/jobs/{job}/attempts")["items"][0]["outcome"] is not None


def test_me_and_health(here: Site) -> None:
    assert here.get("root", "/v1/me")["role"] == "admin"
    assert here.get("", "/healthz")["status"] == "ok"
    assert here.get("", "/v1/maintenance/status") == {"phase": "NORMAL"}
    assert here.get("", "/v1/schema")["openapi"] == "3.1.0"


@pytest.mark.parametrize("path", ["/healthz", "/v1/me", "/v1/nothing", "/v1/jobs/1"])
def test_security_headers_on_everything(here: Site, path: str) -> None:
    headers = here.ask("bcg", "GET", path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert headers["x-frame-options"] == "DENY"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "Authorization" in headers["vary"]
