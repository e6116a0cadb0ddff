"""What a job might try, for real, under every runtime; and that the tries are real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dure.adapters.runtime.attack import run as attack_run
from dure.adapters.runtime.attack.report import MODES, Report, beyond, run_all
from dure.adapters.runtime.process import ProcessRuntime
from tests.jail.rigs import IS_ROOT, ROOT, UID, apptainer_program, need_root

LEAST = 44


def judge(report: Report) -> None:
    assert [(c.name, c.detail) for c in beyond(report)] == []
    assert len(report.checks) >= LEAST
    unproven = [c.name for c in report.checks if not c.proven]
    print(f"{report.mode}: {len(report.checks)} checks, not proven here: {unproven}")
    # As root every attack works without a jail, unless this kernel has not got its target.
    assert len(unproven) <= (3 if IS_ROOT else 25), unproven


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_open_beyond_what_is_allowed(mode, monkeypatch):
    if mode == "bubblewrap-root":
        need_root()
    if mode == "apptainer":
        folder = str(Path(apptainer_program()).parent)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    summary = run_all((mode,))
    (report,) = summary.runs
    assert report.skipped == ""
    judge(report)
    assert summary.open_beyond_allowed == 0
    assert summary.checks == len(report.checks)


ACCOUNT = """
cp /etc/passwd "$1" && echo "kim:x:$2:$2::/nonexistent:/bin/sh" >>"$1" || exit 1
mount --bind "$1" /etc/passwd || exit 1
shift 2; exec "$@"
"""
"""Gives a user an account in a mount namespace of its own: Apptainer asks for one."""


@pytest.mark.parametrize("mode", ["bubblewrap", "apptainer"])
def test_server_without_root(tmp_path, mode):
    """The server itself as an ordinary user: nothing of the jail needs more."""
    need_root()
    path = os.defpath
    if mode == "apptainer":
        path = f"{Path(apptainer_program()).parent}:{path}"
    python = "/usr/bin/python3"
    same = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = subprocess.run(
        [python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.stdout.strip() != same:
        pytest.skip(f"{python} is not the Python {same} of the tests, which others cannot run")
    site = str(Path(msgspec.__file__).parents[1])
    become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    account = ["unshare", "--mount", "sh", "-c", ACCOUNT, "sh", str(tmp_path / "passwd"), str(UID)]
    done = subprocess.run(
        [*account, *become, python, "-m", "dure.adapters.runtime.attack", mode],
        env={"PATH": f"{path}:/sbin:/usr/sbin", "PYTHONPATH": f"{ROOT / 'src'}:{site}"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if "No module named" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("the checkout lies where no other user may read it")
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout, type=Report)
    assert [(c.name, c.detail) for c in beyond(report)] == []
    assert len(report.checks) >= LEAST
    unproven = [c.name for c in report.checks if not c.proven]
    assert "files: read another user's job output" not in unproven
    assert "network: TCP to a service on the machine's loopback" not in unproven


def test_a_jail_that_is_none_is_found_out(monkeypatch):
    """The control of the whole suite: without a jail it must shout."""
    monkeypatch.setitem(attack_run.MODES, "bubblewrap", lambda yard: ProcessRuntime())
    report = attack_run.attack("bubblewrap")
    found = {c.name for c in beyond(report)}
    assert {
        "files: read the server's database",
        "network: TCP to a service on the machine's loopback",
        "processes: see those of the machine",
        "power: new user namespace",
        "power: programs may still gain privileges",
    } <= found
    assert len(found) >= 20


def test_a_run_that_breaks_is_no_green_one():
    summary = run_all(("no such mode",))
    assert summary.open_beyond_allowed == 1
