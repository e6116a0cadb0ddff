"""`dure doctor`: what is there, what is missing, and what to do about it, a line each."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import sqlite3
from pathlib import Path

import click
import msgspec

from dure.adapters.compute.local import controllers
from dure.adapters.compute.local.gpus import probe
from dure.adapters.probe import missing_program
from dure.adapters.runtime import seccomp
from dure.adapters.runtime.choose import choose
from dure.client import Client
from dure.core.errors import DureError
from dure.core.lease import QueueAway
from dure.settings import Settings, load
from dure.wiring.build import yard


class Check(msgspec.Struct, frozen=True):
    """One thing looked at: `ok`, `warn` or `fail`, and a sentence."""

    name: str
    status: str
    detail: str


def checks(settings: Settings) -> list[Check]:
    """Look at this machine and at the server that the client's settings name."""
    python = Check("python", "ok", f"Python {platform.python_version()}")
    return [
        python,
        _sqlite(),
        _state(settings),
        _gpus(settings),
        *_jail(settings),
        _limits(settings),
        _files(),
        *_edge(settings),
        _server(),
    ]


def _sqlite() -> Check:
    ok = sqlite3.sqlite_version_info >= (3, 35)
    return Check("sqlite", "ok" if ok else "fail", f"SQLite {sqlite3.sqlite_version}")


def _state(settings: Settings) -> Check:
    folder = settings.state_dir()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(existing, os.W_OK):
        return Check("state", "fail", f"{existing} cannot be written; set [server] state_dir")
    free_gb = shutil.disk_usage(existing).free / 1e9
    status = "ok" if free_gb > 5 else "warn"
    return Check("state", status, f"{folder}, {free_gb:.0f} GB free")


def _gpus(settings: Settings) -> Check:
    found = probe()
    slots = sum(g.count for g in settings.node.gpus if g.simulated)
    if found.gpus:
        names = ", ".join(f"{g.index}: {g.name or g.problem}" for g in found.gpus)
        return Check("gpus", "ok" if all(g.healthy for g in found.gpus) else "warn", names)
    if slots:
        return Check("gpus", "warn", f"{slots} SIMULATED slots declared; {found.problem}")
    hint = "declare [[node.gpus]] with simulated = true to try Dure without a GPU"
    return Check("gpus", "warn", f"{found.problem}; {hint}")


def _jail(settings: Settings) -> list[Check]:
    """The runtime that a server with these settings would use, and whom jobs would run as."""
    try:
        choice = choose(settings.node.runtime, yard(settings))
    except DureError as error:
        return [Check("runtime", "fail", str(error.params.get("value")))]
    passed = "".join(f"; {why}" for why in choice.passed)
    if not choice.runtime.confines:
        unconfined = "jobs run UNCONFINED as this user: only for one person's machine"
        hint = "; install bubblewrap" if settings.node.runtime == "auto" else ""
        return [Check("runtime", "warn", f"`process`: {unconfined}{hint}{passed}")]
    found = [Check("runtime", "ok", f"`{choice.runtime.name}`{passed}")]
    if not seccomp.program(os.uname().machine):
        hole = f"no filter of system calls for {os.uname().machine}: jobs may make user namespaces"
        found.append(Check("filter", "warn", hole))
    if os.getuid() == 0 and not settings.policy.first_unix_uid:
        hint = "set `first_unix_uid` of [policy], or `dure admin user set NAME --unix-uid UID`"
        sentence = f"jobs of users without a unix_uid run as root in a user namespace; {hint}"
        found.append(Check("users", "warn", sentence))
    return found


def _limits(settings: Settings) -> Check:
    found = controllers.find(os.environ.get("DURE_CGROUP_ROOT", ""))
    if found.layout is None:
        problem = f"memory, cores and processes of jobs are NOT limited: {found.problem}"
        return Check("limits", "warn", f"{problem}; run the server with `Delegate=yes`")
    missing = set(controllers.WANTED) - set(found.layout.folders)
    what = f"control groups, version {found.layout.version}"
    if found.layout.version == 1 and missing:
        return Check("limits", "warn", f"{what}, without {', '.join(sorted(missing))}")
    return Check("limits", "ok", f"{what}; at most {settings.node.processes} processes a job")


def _edge(settings: Settings) -> list[Check]:
    if not settings.edge.redis_url:
        return []
    from dure.wiring.edge import queue_faults  # noqa: PLC0415 - needs the edge extra

    try:
        faults = queue_faults(settings)
    except (DureError, QueueAway) as error:
        return [Check("lease queue", "fail", f"{error}; see docs/howto/edge.md")]
    program = missing_program(settings.edge.probe)
    if program:
        faults.append(f"edge.probe needs the program {program}, which is not installed")
    if not faults:
        return [Check("lease queue", "ok", "Redis answers and keeps what it is told")]
    return [Check("lease queue", "fail", fault) for fault in faults]


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status = "ok" if hard == resource.RLIM_INFINITY or hard >= 4096 else "warn"
    return Check("open files", status, f"limit {soft} (at most {hard})")


def _server() -> Check:
    try:
        with Client() as client:
            client.request("GET", "/healthz")
    except Exception as error:  # noqa: BLE001 - whatever is wrong is what doctor tells
        return Check("server", "warn", f"no answer ({error}); start one with `dure server`")
    return Check("server", "ok", f"{client.url} answers")


def doctor(settings_path: Path | None, *, as_json: bool) -> int:
    """Print all checks; exit 1 if one failed."""
    try:
        found = [Check("settings", "ok", str(settings_path or "defaults"))]
        found += checks(load(settings_path))
    except DureError as error:
        found = [Check("settings", "fail", str(error))]
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(c) for c in found]))
    else:
        marks = {"ok": "✓", "warn": "!", "fail": "✗"}
        for check in found:
            click.echo(f"{marks[check.status]} {check.name:<11} {check.detail}")
    return 1 if any(c.status == "fail" for c in found) else 0


def attack(*, as_json: bool) -> int:
    """Run the attacks on this machine's jails; exit 1 if one works that must not."""
    from dure.adapters.runtime.attack.report import beyond, run_all  # noqa: PLC0415 - seldom used

    summary = run_all()
    if as_json:
        click.echo(msgspec.json.encode(summary))
    for run in () if as_json else summary.runs:
        click.echo(f"{run.mode}: {run.skipped or f'{len(run.checks)} checks'}")
        wrong = {check.name for check in beyond(run)}
        for check in run.checks:
            mark = "✗" if check.name in wrong else "✓"
            state = "open" if check.open else "shut"
            doubt = "" if check.proven else "  (does not work here without a jail either)"
            click.echo(f"  {mark} {state} {check.name}: {check.detail}{doubt}")
    if not as_json:
        click.echo(
            f"checks {summary.checks}, open_beyond_allowed {summary.open_beyond_allowed},"
            f" unproven {summary.unproven}"
        )
    return 1 if summary.open_beyond_allowed or not summary.checks else 0
