"""`dure jobs` and `dure show`."""

from __future__ import annotations

import shlex
import time

import click

from dure import wire
from dure.cli.app import App, pass_app
from dure.cli.exits import note
from dure.cli.output import Column, DataCommand, Output, data_options, gpus, on_terminal, when
from dure.cli.refs import JobRef, resolve_one
from dure.cli.texts import say
from dure.client.quantities import moment_ms, seconds
from dure.core.messages import duration
from dure.core.model import JobState

_STATES = [s.value for s in JobState]


def columns(lang: str) -> list[Column]:
    """Columns of a list of jobs."""
    return [
        Column("job", lambda j: str(j.id), right=True),
        Column("state", lambda j: j.state_text),
        Column("name", lambda j: j.name or shlex.join(j.command)[:40], flex=True),
        Column("lab", lambda j: j.lab),
        Column("user", lambda j: j.user),
        Column("gpu", lambda j: gpus(j.num_gpus, j.min_vram_gb, j.tiers)),
        Column("node", lambda j: j.placement.node if j.placement else ""),
        Column("time", lambda j: ran(j, lang), right=True),
        Column("exit", lambda j: "" if j.exit_code is None else str(j.exit_code), right=True),
        Column("submitted", lambda j: when(j.submitted_ms)),
    ]


def ran(job: wire.JobOut, lang: str) -> str:
    """How long it has run, or ran."""
    if not job.started_ms:
        return ""
    end_ms = job.ended_ms or time.time() * 1000
    return duration((end_ms - job.started_ms) / 1000, lang)


@click.command(cls=DataCommand)
@click.option(
    "--state",
    multiple=True,
    type=click.Choice(_STATES, case_sensitive=False),
    help="only in this state; repeatable",
)
@click.option("--since", metavar="WHEN", help="submitted since: 2h, 3d, 08:00 or an ISO time")
@click.option("--name", metavar="NAME", help="only of this name")
@click.option("--user", metavar="USER", help="only of this user")
@click.option("--lab", metavar="LAB", help="only of this lab")
@click.option("--mine", is_flag=True, help="only mine")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, help="at most (default 50)")
@data_options(wire.JobOut)
@pass_app
def jobs(
    app: App,
    state: tuple[str, ...],
    since: str | None,
    name: str | None,
    user: str | None,
    lab: str | None,
    mine: bool,
    limit: int,
    out: Output,
) -> None:
    """List jobs, newest first."""
    found = app.client.jobs(
        state=state,
        user=user,
        lab=lab,
        name=name,
        mine=mine,
        since_ms=None if since is None else _since(since),
        limit=limit,
    )
    out.rows([j.info for j in found], columns(app.language), lambda j: j.id)
    if not found and not out.json and on_terminal():
        note(say("no_jobs"))


def _since(text: str) -> int:
    """Past moment of `2h` (ago), or of a point in time."""
    now_ms = round(time.time() * 1000)
    try:
        return now_ms - seconds(text) * 1000
    except ValueError:
        pass
    try:
        at_ms = moment_ms(text)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    # `08:00` means the last one here, not the next.
    return at_ms if at_ms <= now_ms else at_ms - 86_400_000


@click.command(cls=DataCommand)
@click.argument("job", type=JobRef())
@data_options(wire.JobOut)
@pass_app
def show(app: App, job: str, out: Output) -> None:
    """Show everything about JOB."""
    seen = app.client.job_out(resolve_one(app.client, job))
    out.one(seen, _pairs(seen, app.language), seen.id)


def _pairs(job: wire.JobOut, lang: str) -> list[tuple[str, str]]:
    place = job.placement
    mark = f" {say('simulated')}" if place and place.simulated else ""
    at = f"{place.node} {place.tier}{mark} GPU {place.gpus}" if place else ""
    limit = f" / {duration(job.time_limit_s, lang)}" if job.time_limit_s else ""
    return [
        ("job", str(job.id)),
        ("name", job.name),
        ("state", job.state_text),
        ("rank", "" if job.rank is None else str(job.rank)),
        ("lab", job.lab),
        ("user", job.user),
        ("command", shlex.join(job.command)),
        ("gpu", gpus(job.num_gpus, job.min_vram_gb, job.tiers)),
        ("node", at or (job.node or "")),
        ("reserved", _reserved(job)),
        ("time", f"{ran(job, lang)}{limit}".strip()),
        ("submitted", when(job.submitted_ms)),
        ("started", when(job.started_ms)),
        ("ended", when(job.ended_ms)),
        ("exit", "" if job.exit_code is None else str(job.exit_code)),
        ("error", f"{job.error.text} ({job.error.code})" if job.error else ""),
        ("starts", str(job.starts)),
        ("retries", str(job.retries)),
        ("charge", f"{job.charge.total_tflop_s} TFLOP-s" if job.charge else ""),
        ("labels", " ".join(f"{k}={v}" for k, v in job.labels.items())),
        ("output", job.output_dir or ""),
    ]


def _reserved(job: wire.JobOut) -> str:
    held = job.reservation
    return f"{held.count}/{job.num_gpus} {held.node} {held.tier}" if held else ""
