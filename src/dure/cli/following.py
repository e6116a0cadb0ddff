"""`dure logs` and `dure wait`, and the view that `dure run` shares with them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import click

from dure import wire
from dure.cli.app import App, leave, pass_app
from dure.cli.exits import Exit, clean, exit_of_job, note
from dure.cli.output import DataCommand, Output, data_options
from dure.cli.refs import JobRef, resolve, resolve_one
from dure.cli.texts import say
from dure.client import ClientError, Job, JobEnded, LogChunk, WaitTimeout
from dure.client.logs import Follower
from dure.client.quantities import seconds
from dure.core.messages import duration
from dure.core.model import TERMINAL
from dure.wire import JobOut


class WaitLine:
    """Says why a job waits: one live line on a terminal, a line per change elsewhere."""

    def __init__(self, app: App, *, quiet: bool = False) -> None:
        self._app = app
        self._quiet = quiet
        self._said = ""
        self._live = False

    def show(self, job: JobOut) -> None:
        """Look why it waits and say so if that is new."""
        if self._quiet:
            return
        sentence = say("waiting", id=job.id, state=job.state_text, reason="")
        with suppress(ClientError):  # the next look tells
            sentence = self._sentence(self._app.client.why(job.id))
        if sentence == self._said:
            return
        self._said = sentence
        if sys.stderr.isatty():
            self._draw(clean(f"{sentence}   {say('view_hint')}"))
        else:
            note(sentence.rstrip())

    def clear(self) -> None:
        """Take the live line away before anything else is written."""
        if self._live:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
        self._live = False
        self._said = ""

    def _draw(self, text: str) -> None:
        from shutil import get_terminal_size  # noqa: PLC0415

        from rich.cells import set_cell_size  # noqa: PLC0415 - knows Hangul widths

        fitting = set_cell_size(text, get_terminal_size().columns - 1).rstrip()
        sys.stderr.write(f"\r\x1b[2K{fitting}")
        sys.stderr.flush()
        self._live = True

    @staticmethod
    def _sentence(why: wire.WhyOut) -> str:
        reason = why.reason.text if why.reason else ""
        if why.eta is not None:
            reason = f"{reason} {say('expected', when=why.eta.text)}"
        if why.rank is not None:
            return say("waiting_rank", id=why.job, rank=why.rank, reason=reason)
        return say("waiting", id=why.job, state=why.state_text, reason=reason)


class View:
    """Writes a job's output to stdout, and on stderr which attempt it is of."""

    def __init__(self, app: App, job_id: int, *, quiet: bool = False) -> None:
        self._app = app
        self._id = job_id
        self._quiet = quiet
        self._epoch = 0
        self.line = WaitLine(app, quiet=quiet)
        self._out: BinaryIO = sys.stdout.buffer

    def write(self, chunk: LogChunk) -> None:
        """Pass bytes through as they are."""
        self.line.clear()
        if chunk.epoch != self._epoch:
            if self._epoch and not self._quiet:
                self._announce(chunk.epoch)
            self._epoch = chunk.epoch
        self._out.write(chunk.data)
        self._out.flush()

    def _announce(self, epoch: int) -> None:
        with suppress(ClientError):
            for a in self._app.client.attempts(self._id):
                if a.epoch == epoch:
                    place = a.placement
                    note(say("attempt", start=a.start_no, node=place.node, tier=place.tier))


def follow_job(app: App, job: Job, *, quiet: bool, cancel_on_exit: bool, own_code: bool) -> int:
    """Follow until the job ends; return the exit code. Ctrl-C leaves the view."""
    view = View(app, job.id, quiet=quiet)
    try:
        with _closing_terminal_interrupts(wanted=cancel_on_exit):
            follower = Follower(app.client, job.id, on_idle=view.line.show)
            for chunk in follower.chunks():
                view.write(chunk)
            ended = job.refresh().info
    except KeyboardInterrupt:
        view.line.clear()
        return _leave_view(job, cancel=cancel_on_exit)
    except ClientError:
        view.line.clear()
        note(say("job_went_on", id=job.id))
        raise
    view.line.clear()
    if not quiet:
        note(ending_sentence(ended, app.language))
    if own_code and ended.exit_code is not None:
        return ended.exit_code & 0xFF
    return exit_of_job(ended)


def _leave_view(job: Job, *, cancel: bool) -> int:
    note("")
    if cancel:
        job.cancel()
        note(say("view_cancelled", id=job.id))
    else:
        note(say("view_left", id=job.id))
    return Exit.VIEW_LEFT


@contextmanager
def _closing_terminal_interrupts(*, wanted: bool) -> Iterator[None]:
    """With --cancel-on-exit a closed terminal or SIGTERM counts as Ctrl-C."""
    if not wanted:
        yield
        return
    kinds = (signal.SIGTERM, signal.SIGHUP)
    old = [signal.signal(kind, signal.default_int_handler) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, old, strict=True):
            signal.signal(kind, handler)


def ending_sentence(job: JobOut, lang: str) -> str:
    """Say how a job ended."""
    mark = "✓" if exit_of_job(job) is Exit.OK else "✗"
    detail = f" · {job.error.text}" if job.error else ""
    if job.exit_code:
        detail += say("exit_code", code=job.exit_code)
    if not job.started_ms or not job.ended_ms:
        return say("ended_unstarted", mark=mark, id=job.id, state=job.state_text, detail=detail)
    took = duration((job.ended_ms - job.started_ms) / 1000, lang)
    return say("ended", mark=mark, id=job.id, state=job.state_text, took=took, detail=detail)


@click.command()
@click.argument("job", type=JobRef())
@click.option("-f", "--follow", is_flag=True, help="go on until the job ends")
@click.option(
    "--tail", type=click.IntRange(0, 1_000_000), metavar="N", help="only the last N lines"
)
@click.option("--attempt", type=click.IntRange(1), metavar="K", help="output of one attempt")
@pass_app
def logs(app: App, job: str, follow: bool, tail: int | None, attempt: int | None) -> None:
    """Print what JOB printed, also after its end; without --attempt, of the newest attempt."""
    number = resolve_one(app.client, job)
    view = View(app, number)
    if not follow:
        for chunk in app.client.log_chunks(number, tail=tail, attempt=attempt):
            view.write(chunk)
        return
    try:
        follower = Follower(app.client, number, attempt=attempt, on_idle=view.line.show)
        for chunk in follower.chunks(tail=tail):
            view.write(chunk)
    except KeyboardInterrupt:
        view.line.clear()
        note("")
        leave(Exit.VIEW_LEFT)
    view.line.clear()


@click.command(cls=DataCommand)
@click.argument("jobs", nargs=-1, required=True, type=JobRef())
@click.option("--timeout", metavar="TIME", help="give up after: 30m, 6h (exit 8; jobs go on)")
@data_options(JobOut)
@pass_app
def wait(app: App, jobs: tuple[str, ...], timeout: str | None, out: Output) -> None:
    """Wait until JOBS have ended; exit with the code of the first that did not complete."""
    try:
        left_s = None if timeout is None else seconds(timeout)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    from time import monotonic  # noqa: PLC0415

    started = monotonic()
    seen: list[JobOut] = []
    for number in resolve(app.client, jobs):
        job = app.client.job(number)
        rest = None if left_s is None else max(0.0, left_s - (monotonic() - started))
        with suppress(JobEnded, WaitTimeout):
            job.wait(None if rest is None else rest)
        seen.append(job.info)
        _tell_waited(app, job.info, quiet=out.quiet)
    out.result(seen)
    leave(next((code for code in map(exit_of_job, seen) if code is not Exit.OK), Exit.OK))


def _tell_waited(app: App, job: JobOut, *, quiet: bool) -> None:
    if quiet:
        return
    if job.state in TERMINAL:
        note(ending_sentence(job, app.language))
    else:
        note(say("still", id=job.id, state=job.state_text))
