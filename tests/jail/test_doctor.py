"""`dure doctor` tells what this machine's jails are worth."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from dure.adapters.runtime.attack import report
from dure.adapters.runtime.attack.report import Check, Report, Summary
from dure.settings import NodeSettings, Settings, load
from dure.wiring import build, doctor
from tests.e2e.site import DURE
from tests.jail.rigs import IS_ROOT


def named(settings: Settings) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.checks(settings)}


def test_it_names_the_runtime_and_the_limits(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = named(Settings())
    assert found["runtime"].status == "ok"
    assert "`bubblewrap`" in found["runtime"].detail
    assert found["limits"].status in ("ok", "warn")
    assert ("users" in found) is IS_ROOT


def test_it_warns_loudly_of_a_runtime_that_confines_nothing():
    found = named(Settings(node=NodeSettings(runtime="process")))
    assert found["runtime"].status == "warn"
    assert "UNCONFINED" in found["runtime"].detail


def test_it_says_where_nothing_is_limited(monkeypatch):
    monkeypatch.setenv("DURE_CGROUP_ROOT", "/nowhere")
    found = named(Settings())
    assert found["limits"].status == "warn"
    assert "NOT limited" in found["limits"].detail


def test_the_server_says_so_at_its_start_and_refuses_what_does_not_work(tmp_path):
    config = tmp_path / "dure.toml"
    config.write_text(
        f'[server]\nstate_dir = "{tmp_path / "state"}"\n[node]\nruntime = "apptainer"\n'
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("DURE_")}
    env["PATH"] = str(tmp_path)
    done = subprocess.run(
        [DURE, "server", "--config", config],
        env=env,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2
    assert "apptainer is not installed" in done.stderr


def test_settings_reach_the_jail(tmp_path):
    config = tmp_path / "dure.toml"
    config.write_text(
        f'[server]\nstate_dir = "{tmp_path}/state"\n[node]\nshared = ["/opt"]\nworkdirs = ["{tmp_path}"]\n'
        "processes = 77\noutput_limit_mib = 5\nlog_limit_mib = 6\n"
    )
    settings = load(config, {})
    made = build.confinement(settings, None)
    assert made.workdirs == (str(tmp_path), "/opt")
    assert (made.processes, made.output_limit_mib, made.log_limit_mib) == (77, 5, 6)
    assert made.state_dir == build.yard(settings).state_dir == str(tmp_path / "state")
    assert build.yard(settings).shared == ("/opt",)


def check(name: str, **fields: bool) -> Check:
    return Check(
        **{"name": name, "open": False, "allowed": False, "proven": True, "detail": "x", **fields}
    )


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ((check("a"), check("own: b", open=True, allowed=True)), 0),
        ((check("a", open=True),), 1),
        ((check("own: b", allowed=True),), 1),
        ((), 1),
    ],
)
def test_attack_exits_1_if_something_is_open_or_nothing_was_tried(
    checks, code, monkeypatch, capsys
):
    run = Report(mode="bubblewrap", checks=checks)
    wrong = len(report.beyond(run))
    summary = Summary(checks=len(checks), open_beyond_allowed=wrong, unproven=0, runs=(run,))
    monkeypatch.setattr(report, "run_all", lambda: summary)
    assert doctor.attack(as_json=True) == code
    told = json.loads(capsys.readouterr().out)
    assert (told["checks"], told["open_beyond_allowed"]) == (len(checks), wrong)
    assert doctor.attack(as_json=False) == code
    assert f"open_beyond_allowed {wrong}" in capsys.readouterr().out


def test_another_machine_leaves_no_namespace_behind():
    before = sorted(Path("/run/netns").iterdir()) if Path("/run/netns").exists() else []
    with report.other_machine() as around:
        if IS_ROOT:
            assert around.before
            assert around.after[0] == report.OUTSIDE
    after = sorted(Path("/run/netns").iterdir()) if Path("/run/netns").exists() else []
    assert before == after
