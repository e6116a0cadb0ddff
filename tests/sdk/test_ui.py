"""MLflow's own pages in a real browser: a section per node with the right (N)."""

from __future__ import annotations

import shutil
import time

import mlflow
import pytest

from dure_sdk import tracking
from tests.sdk.test_real_mlflow import TRAIN

CHROMIUM = shutil.which("chromium")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SERIES = "system/node_memory_usage_percentage"


@pytest.fixture
def page():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (Debian's package: chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser.new_page(viewport={"width": 1600, "height": 3000})
        browser.close()


@pytest.mark.timeout(180)
def test_sections_per_node_with_their_count(server, python, page, tmp_path):
    """Three pods: two on node n1, one on n2, as a job of three workers would have them."""
    mlflow.set_tracking_uri(server.uri)
    run_id = tracking.init_driver(run_name="three pods")
    (tmp_path / "cgroups").mkdir()
    env = {"MLFLOW_TRACKING_URI": server.uri, "DURE_MLFLOW_RUN_ID": run_id, "WORLD_SIZE": "3"}
    env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env["DURE_CGROUP_ROOT"] = str(tmp_path / "cgroups")
    pods = [
        python(TRAIN, {**env, "RANK": str(rank), "NODE_NAME": node})
        for rank, node in enumerate(("n1", "n1", "n2"))
    ]
    for pod in pods:
        out = pod.communicate(timeout=90)[0]
        assert pod.returncode == 0, out
    tracking.end_run()
    page.goto(f"{server.uri}/#/experiments/0/runs/{run_id}/system-metrics")
    wanted = {f"{SERIES}/n1": "(2)", f"{SERIES}/n2": "(1)"}
    assert sections(page, wanted) == wanted, page.inner_text("body")
    assert "unknown" not in page.inner_text("body")


def sections(page, wanted: dict[str, str]) -> dict[str, str]:
    """Title of each wanted section → the count behind it."""
    end = time.monotonic() + 60
    found: dict[str, str] = {}
    while time.monotonic() < end and len(found) < len(wanted):
        lines = [line.strip() for line in page.inner_text("body").splitlines() if line.strip()]
        for i, line in enumerate(lines):
            for title in wanted:
                rest = line.removeprefix(title).strip() or ([*lines, ""])[i + 1]
                if line.startswith(title) and rest.startswith("("):
                    found[title] = rest
        time.sleep(0.5)
    return found
