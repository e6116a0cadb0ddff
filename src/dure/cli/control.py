"""cancel, hold, release, retry, rerun, edit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import msgspec

from dure import wire
from dure.cli.app import App, confirm, leave, pass_app
from dure.cli.exits import Exit, complain, note
from dure.cli.output import DataCommand, Output, clock, data_options
from dure.cli.refs import JobRef, TierRef, resolve, resolve_one
from dure.cli.texts import say
from dure.client import ApiError
from dure.client.quantities import gigabytes, moment_ms, seconds
from dure.wire import JobOut

_jobs = click.argument("jobs", nargs=-1, required=True, type=JobRef())


def _each(
    app: App,
    numbers: list[int],
    act: Callable[[int], JobOut],
    out: Output,
    tell: Callable[..., str],
) -> None:
    """Do it to each job; go on after a refusal, and exit with the first one's code."""
    done: list[JobOut] = []
    code: Exit = Exit.OK
    for number in numbers:
        try:
            job = act(number)
        except ApiError as error:
            code = code or complain(error, verbose=app.verbose)
            continue
        done.append(job)
        if not out.quiet:
            note(tell(job))
    out.result(done)
    leave(code)


def _acted(job: JobOut) -> str:
    return say("acted", id=job.id, state=job.state_text)


@click.command(cls=DataCommand)
@_jobs
@click.option("-y", "--yes", is_flag=True, help="do not ask before cancelling several")
@data_options(JobOut)
@pass_app
def cancel(app: App, jobs: tuple[str, ...], yes: bool, out: Output) -> None:
    """Stop JOBS: ids, ranges (12-15), @last, or names of mine.

    A running job gets SIGTERM and time to save; both are told.
    """
    numbers = resolve(app.client, jobs)
    if len(numbers) > 1:
        shown = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
        action = say("act_cancel")
        confirm(say("confirm_jobs", action=action, count=len(numbers), jobs=shown), yes=yes)
    _each(app, numbers, lambda n: app.client.act(n, "cancel"), out, _cancelled)


def _cancelled(job: JobOut) -> str:
    if job.cancel is None:
        return _acted(job)
    save, kill = clock(job.cancel.checkpoint_until_ms), clock(job.cancel.kill_at_ms)
    return say("stopping", id=job.id, save=save, kill=kill)


@click.command(cls=DataCommand)
@_jobs
@data_options(JobOut)
@pass_app
def hold(app: App, jobs: tuple[str, ...], out: Output) -> None:
    """Keep waiting JOBS from starting until they are released."""
    _each(app, resolve(app.client, jobs), lambda n: app.client.act(n, "hold"), out, _acted)


@click.command(cls=DataCommand)
@_jobs
@data_options(JobOut)
@pass_app
def release(app: App, jobs: tuple[str, ...], out: Output) -> None:
    """Let held JOBS take their turn."""
    _each(app, resolve(app.client, jobs), lambda n: app.client.act(n, "release"), out, _acted)


@click.command(cls=DataCommand)
@_jobs
@data_options(JobOut)
@pass_app
def retry(app: App, jobs: tuple[str, ...], out: Output) -> None:
    """Queue failed JOBS again under their own numbers."""
    _each(app, resolve(app.client, jobs), lambda n: app.client.act(n, "retry"), out, _acted)


@click.command(cls=DataCommand)
@_jobs
@click.option("--parsable", is_flag=True, help="print the new ids alone")
@data_options(JobOut)
@pass_app
def rerun(app: App, jobs: tuple[str, ...], parsable: bool, out: Output) -> None:
    """Submit the same requests as new jobs."""
    new_of: dict[int, int] = {}

    def again(number: int) -> JobOut:
        job = app.client.rerun(number).info
        new_of[job.id] = number
        if (parsable or out.quiet) and not out.json:
            click.echo(str(job.id))
        return job

    out.quiet = out.quiet or parsable
    numbers = resolve(app.client, jobs)
    _each(app, numbers, again, out, lambda j: say("rerun_as", old=new_of[j.id], id=j.id))


@click.command(cls=DataCommand)
@click.argument("job", type=JobRef())
@click.option("-t", "--time", metavar="TIME", help="time limit: 4h; `none`: the site's default")
@click.option("-n", "--name", metavar="NAME", help="new name")
@click.option("-g", "--gpus", type=click.IntRange(1, 8), help="GPUs")
@click.option("--vram", metavar="GB", help="least GPU memory each")
@click.option("--tier", "tiers", multiple=True, type=TierRef(), help="allowed tiers; `any`: all")
@click.option("--node", metavar="NODE", help="only on this node; `any`: all")
@click.option("--not-before", metavar="WHEN", help="22:00, ISO time, +2h; `now`")
@data_options(JobOut)
@pass_app
def edit(app: App, /, job: str, out: Output, **given: Any) -> None:
    """Change what JOB asks for while it waits."""
    try:
        patch = _patch(**given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not msgspec.to_builtins(patch):
        raise click.UsageError(say("nothing_to_edit"))
    changed = app.client.edit(resolve_one(app.client, job), patch)
    if not out.quiet:
        note(say("edited", id=changed.id))
    out.result([changed], single=True)


def _patch(
    *,
    time: str | None,
    name: str | None,
    gpus: int | None,
    vram: str | None,
    tiers: tuple[str, ...],
    node: str | None,
    not_before: str | None,
) -> wire.JobPatch:
    changes: dict[str, object] = {}
    if time is not None:
        changes["time_limit_s"] = None if time == "none" else seconds(time)
    if name is not None:
        changes["name"] = name
    if gpus is not None:
        changes["num_gpus"] = gpus
    if vram is not None:
        changes["min_vram_gb"] = gigabytes(vram)
    if tiers:
        changes["tiers"] = [] if tiers == ("any",) else list(tiers)
    if node is not None:
        changes["node"] = None if node == "any" else node
    if not_before is not None:
        changes["not_before_ms"] = 0 if not_before == "now" else moment_ms(not_before)
    return msgspec.convert(changes, wire.JobPatch)
