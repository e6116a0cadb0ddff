"""`dure run` and `dure submit`."""

from __future__ import annotations

import os
import re
from typing import Any

import click

from dure import wire
from dure.cli import jobspec
from dure.cli.app import App, leave, pass_app
from dure.cli.exits import note
from dure.cli.output import DataCommand, Output, data_options, on_terminal, yes_no
from dure.cli.texts import say
from dure.cli.usage import hours
from dure.client import Job

_SETTINGS = {"allow_interspersed_args": False}
_SBATCH = re.compile(rb"^[ \t]*#SBATCH\b", re.MULTILINE)


@click.command(cls=DataCommand, context_settings=_SETTINGS)
@jobspec.job_options
@click.option("-d", "--detach", is_flag=True, help="submit only: print the id and leave")
@click.option("--cancel-on-exit", is_flag=True, help="cancel the job when the view is left")
@click.option(
    "--exit",
    "exit_with",
    type=click.Choice(["dure", "job"]),
    default="dure",
    help="exit code: Dure's (10 failed, …) or the job's own",
)
@click.option("-q", "--quiet", is_flag=True, help="show the output alone")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@pass_app
def run(
    app: App,
    /,
    command: tuple[str, ...],
    detach: bool,
    cancel_on_exit: bool,
    exit_with: str,
    quiet: bool,
    **flags: Any,
) -> None:
    """Submit CMD, show its place in the line, then follow its output.

    Ctrl-C leaves the view; the job goes on.
    """
    spec = jobspec.take_spec(flags)
    if not command:
        raise click.UsageError(say("no_command", verb="run"))
    asked = jobspec.build(spec, command)
    job = app.client.submit_request(asked, key=spec.key)
    if not quiet:
        _tell_submitted(app, job, asked)
    if detach:
        click.echo(str(job.id))
        return
    from dure.cli.following import follow_job  # noqa: PLC0415 - not needed to submit

    leave(
        follow_job(
            app,
            job,
            quiet=quiet,
            cancel_on_exit=cancel_on_exit,
            own_code=exit_with == "job",
        )
    )


@click.command(cls=DataCommand, context_settings=_SETTINGS)
@jobspec.job_options
@click.option("--dry-run", is_flag=True, help="tell what would happen, submit nothing")
@click.option("--parsable", is_flag=True, help="print the id alone")
@data_options()
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="FILE [ARGS] | -- CMD")
@pass_app
def submit(
    app: App, /, command: tuple[str, ...], dry_run: bool, parsable: bool, out: Output, **flags: Any
) -> None:
    """Submit FILE (python3 for .py, itself if executable, else bash) or, after --, any command.

    The id is printed on stdout in a pipe, with --parsable and with -q.
    """
    spec = jobspec.take_spec(flags)
    if not command:
        raise click.UsageError(say("no_command", verb="submit"))
    out.of(wire.PreviewOut if dry_run else wire.JobOut)
    if not _after_dashes(command):
        command = _of_file(command, absolute=spec.workdir is not None)
    asked = jobspec.build(spec, command)
    if dry_run:
        _show_preview(app.client.preview(asked), out)
        return
    job = app.client.submit_request(asked, key=spec.key)
    if out.json:
        out.result([job.info], single=True)
        return
    if not (parsable or out.quiet):
        _tell_submitted(app, job, asked)
    if parsable or out.quiet or not on_terminal():
        click.echo(str(job.id))


def _tell_submitted(app: App, job: Job, asked: wire.JobIn) -> None:
    request = jobspec.describe(asked, app.language)
    note(say("submitted", id=job.id, name=job.info.name, request=request))


def _after_dashes(command: tuple[str, ...]) -> bool:
    args: list[str] = click.get_current_context().meta["dure.args"]
    return len(args) > len(command) and args[-len(command) - 1] == "--"


def _of_file(command: tuple[str, ...], *, absolute: bool) -> tuple[str, ...]:
    file, *rest = command
    if not os.path.isfile(file):  # noqa: PTH113
        raise click.UsageError(say("no_such_file", file=file))
    with open(file, "rb") as script:  # noqa: PTH123
        ignored = len(_SBATCH.findall(script.read(1 << 16)))
    if ignored:
        note(say("sbatch_ignored", count=ignored, file=file))
    shown = os.path.abspath(file) if absolute else file  # noqa: PTH100
    if file.endswith(".py"):
        return ("python3", shown, *rest)
    if os.access(file, os.X_OK):
        return (shown if "/" in shown else f"./{shown}", *rest)
    return ("bash", shown, *rest)


def _show_preview(seen: wire.PreviewOut, out: Output) -> None:
    fits = [f"{p.node}/{p.tier} ({p.idle}/{p.capacity})" for p in seen.fits if p.fits]
    costs = {t: hours(c) for t, c in seen.cost_per_hour_tflop_s.items()}
    pairs = [
        ("starts_now", yes_no(seen.starts_now)),
        ("ahead", str(seen.ahead)),
        ("fits", ", ".join(fits)),
        ("slots", f"{seen.slots_used}/{seen.slots_limit}"),
        ("cost_per_hour", ", ".join(f"{t} {h} 4090-h" for t, h in costs.items())),
    ]
    out.one(seen, pairs, yes_no(seen.starts_now))
    if out.json or out.quiet:
        return
    if not fits:
        note(say("preview_nowhere"))
    elif seen.starts_now:
        note(say("preview_now"))
    else:
        note(say("preview_wait", ahead=seen.ahead))
