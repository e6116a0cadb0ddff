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

from dure.adapters.compute.local.gpus import probe
from dure.adapters.probe import missing_program
from dure.client import Client
from dure.core.errors import DureError
from dure.core.lease import QueueAway
from dure.settings import Settings, load


class Check(msgspec.Struct, frozen=True):
    """One thing looked at: `ok`, `warn` or `fail`, and a sentence."""

    name: str
    status: str
    detail: str


def checks(settings: Settings) -> list[Check]:
    """Look at this machine and at the server that the client's settings name."""
    python = Check("python", "ok", f"Python {platform.python_version()}")
    found = [python, _sqlite(), _state(settings), _gpus(settings), _runtime(), _files()]
    return [*found, *_edge(settings), _server()]


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


def _runtime() -> Check:
    sentence = "runtime `process`: jobs run UNCONFINED as this user; only for one person's machine"
    return Check("runtime", "warn", sentence)


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
