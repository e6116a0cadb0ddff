"""What a call can raise. Every class says what happened, none carries the token."""

from __future__ import annotations

from dure.core.model import JobState
from dure.wire import JobOut, Problem


class ClientError(Exception):
    """Parent of everything the client raises about a server or a job."""


class ApiError(ClientError):
    """The server refused; `problem` has the stable code, the sentence and the hint."""

    def __init__(self, problem: Problem, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(problem.detail or problem.title)
        self.problem = problem
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> str:
        """Stable code, such as NOT_FOUND."""
        return self.problem.code

    def __str__(self) -> str:
        """Return the sentence with its code, and the hint when there is one."""
        said = f"{self.problem.detail or self.problem.title} [{self.code}]"
        return f"{said} {self.problem.hint}".rstrip()


class Unreachable(ClientError):  # noqa: N818 - reads as what happened
    """No answer: refused, timed out, or the connection was lost and repeating is not safe."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url} does not answer: {reason}")
        self.url = url
        self.reason = reason


class BadReply(ClientError):  # noqa: N818 - reads as what happened
    """Something answered, but not as Dure does (a wrong address, a captive portal)."""


class BadConfig(ClientError):  # noqa: N818 - reads as what happened
    """The client's settings cannot be used; the sentence says which and why."""


class JobEnded(ClientError):  # noqa: N818 - reads as what happened
    """Parent of the ways in which a job ends without success. `job` is its last state."""

    def __init__(self, job: JobOut) -> None:
        said = job.error.text if job.error is not None else job.state_text
        super().__init__(f"job {job.id} {job.state.value}: {said}")
        self.job = job
        self.exit_code = job.exit_code
        self.error = job.error


class JobFailed(JobEnded):
    """The command ended with an error, or could not be started."""


class OutOfMemory(JobFailed):
    """GPU memory ran out and no larger tier may be tried; `tier` is where it happened."""

    def __init__(self, job: JobOut) -> None:
        super().__init__(job)
        params = job.error.params if job.error is not None else {}
        named = params.get("tier")
        self.tier = str(named) if named else (job.placement.tier if job.placement else "")


class JobCancelled(JobEnded):
    """Somebody cancelled it."""


class JobTimedOut(JobEnded):
    """It reached its time limit."""


class JobDead(JobEnded):
    """Given up: repeats used up, its process lost, or suspected of breaking nodes."""


class WaitTimeout(ClientError):  # noqa: N818 - reads as what happened
    """The job is still pending or running; it goes on."""

    def __init__(self, job: JobOut) -> None:
        super().__init__(f"job {job.id} is still {job.state.value}")
        self.job = job


OOM_CODES = frozenset({"OOM_NO_LARGER_TIER", "GPU_OOM"})


def ending(job: JobOut) -> JobEnded | None:
    """Return the exception of a job that ended badly; None of one that completed or goes on."""
    match job.state:
        case JobState.FAILED:
            oom = job.error is not None and job.error.code in OOM_CODES
            return OutOfMemory(job) if oom else JobFailed(job)
        case JobState.CANCELLED:
            return JobCancelled(job)
        case JobState.TIMED_OUT:
            return JobTimedOut(job)
        case JobState.DEAD:
            return JobDead(job)
        case _:
            return None
