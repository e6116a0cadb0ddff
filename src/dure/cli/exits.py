"""Exit codes, and how a refusal is told on stderr.

The table is a promise to scripts: codes may be added, none changes its meaning.
"""

from __future__ import annotations

import traceback
from enum import IntEnum

import click

from dure.cli.texts import say
from dure.client.errors import ApiError, BadConfig, ClientError, Unreachable
from dure.core.model import JobState
from dure.wire import JobOut, Param


class Exit(IntEnum):
    """What a script can rely on."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_FOUND = 3
    NOT_ALLOWED = 4
    UNREACHABLE = 6
    MAINTENANCE = 7
    PENDING = 8
    JOB_FAILED = 10
    JOB_CANCELLED = 11
    JOB_OOM = 12
    JOB_TIMED_OUT = 13
    JOB_DEAD = 14
    VIEW_LEFT = 130


_BY_STATUS = {
    400: Exit.USAGE,
    401: Exit.NOT_ALLOWED,
    403: Exit.NOT_ALLOWED,
    404: Exit.NOT_FOUND,
    405: Exit.USAGE,
    409: Exit.USAGE,
    412: Exit.USAGE,
    413: Exit.USAGE,
    415: Exit.USAGE,
    422: Exit.USAGE,
    428: Exit.USAGE,
    429: Exit.UNREACHABLE,
}
_BY_STATE = {
    JobState.COMPLETED: Exit.OK,
    JobState.FAILED: Exit.JOB_FAILED,
    JobState.CANCELLED: Exit.JOB_CANCELLED,
    JobState.TIMED_OUT: Exit.JOB_TIMED_OUT,
    JobState.DEAD: Exit.JOB_DEAD,
}


def exit_of_status(status: int, code: str) -> Exit:
    """Exit code of an HTTP refusal."""
    if code == "QUEUE_LIMIT":
        return Exit.USAGE
    if code == "SERVICE_MAINTENANCE":
        return Exit.MAINTENANCE
    if status >= 500:
        return Exit.UNREACHABLE
    return _BY_STATUS.get(status, Exit.UNEXPECTED)


def exit_of(error: BaseException) -> Exit:
    """Exit code of anything raised."""
    if isinstance(error, ApiError):
        return exit_of_status(error.status, error.code)
    if isinstance(error, Unreachable):
        return Exit.UNREACHABLE
    if isinstance(error, BadConfig):
        return Exit.USAGE
    if isinstance(error, KeyboardInterrupt):
        return Exit.VIEW_LEFT
    return Exit.UNEXPECTED


def exit_of_job(job: JobOut) -> Exit:
    """Exit code of how a job ended; PENDING while it has not."""
    if job.state is JobState.FAILED and job.error and job.error.code == "OOM_NO_LARGER_TIER":
        return Exit.JOB_OOM
    return _BY_STATE.get(job.state, Exit.PENDING)


def complain(error: BaseException, *, verbose: bool = False) -> Exit:
    """Tell what went wrong on stderr and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        note("")
    elif isinstance(error, ApiError):
        _complain_api(error)
    elif isinstance(error, Unreachable):
        note("✗ " + say("unreachable", url=error.url, reason=error.reason))
        note(say("unreachable_hint"))
    elif isinstance(error, ClientError):
        note(f"✗ {error}")
    else:
        note("✗ " + say("unexpected", kind=type(error).__name__, detail=error))
        if verbose:
            note("".join(traceback.format_exception(error)))
        else:
            note(say("unexpected_hint"))
    return exit_of(error)


def _complain_api(error: ApiError) -> None:
    problem = error.problem
    note(f"✗ {problem.detail or problem.title}")
    for wrong in problem.errors:
        note(f"  {wrong.pointer}: {wrong.detail}")
    if problem.nearest_requests:
        for request in problem.nearest_requests:
            note(say("nearest", flags=as_flags(request)))
    elif problem.hint:
        note(f"  {problem.hint}")
    key = "code_line" if problem.trace_id else "code_only"
    note(say(key, code=problem.code, trace=problem.trace_id))


def as_flags(request: dict[str, Param]) -> str:
    """A request of NO_FIT_PLACEMENT as flags to paste."""
    import shlex  # noqa: PLC0415 - only for a refusal

    names = {"num_gpus": "-g", "min_vram_gb": "--vram", "tier": "--tier", "node": "--node"}
    parts: list[str] = []
    for key, flag in names.items():
        value = request.get(key)
        if value:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            parts += [flag, shlex.quote(shown)]
    return " ".join(parts)


def note(text: str, *, nl: bool = True) -> None:
    """Say something to a person: stderr, without control characters of others."""
    click.echo("\n".join(clean(line) for line in text.split("\n")), err=True, nl=nl)


_CONTROLS = {
    **dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], " "),
    **dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], None),
}


def clean(text: str) -> str:
    """Text of others (job names, reasons) made harmless for a terminal and for TSV."""
    return text.translate(_CONTROLS)
