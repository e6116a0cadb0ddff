"""Honest system metrics in MLflow: one call, right after the run opens.

Rule: no function here stops training. What fails is told in one line, and the program goes on.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing typing costs more than this whole package may
if TYPE_CHECKING:
    from typing import Any

    from dure_sdk.preflight import Preflight
    from dure_sdk.session import Session

RUN_ID_ENV = "DURE_MLFLOW_RUN_ID"
"""Tells workers the driver's run. MLflow's own variable would be taken by the next nested run."""
STOP_LIMIT_S = 30.0
ASK_LIMIT_S = 5.0

__all__ = [
    "enable_system_metrics",
    "end_run",
    "init_driver",
    "preflight",
    "prepare_worker",
    "start_run",
    "worker_env",
]

_session: Session | None = None
_owned: set[str] = set()
_attached: set[str] = set()
_prepared: str | None = None
"""The run this worker was told of; it can be recorded though MLflow could not be asked for it."""
_exit_registered = False


def enable_system_metrics(
    *,
    all_workers: bool = False,
    interval: float | None = None,
    samples: int | None = None,
    run_id: str | None = None,
    tracking_uri: str | None = None,
) -> bool:
    """Record system metrics of the open run; call it before data loaders and models exist.

    One worker (rank 0) records, or every one with `all_workers=True`. `interval` is in seconds
    (10), `samples` is how many make one point (1). `run_id` names a run that is not open in this
    thread, as loggers hold it. Returns whether this process records.
    """
    try:
        return _enable(all_workers, interval, samples, run_id, tracking_uri)
    except Exception as error:  # noqa: BLE001 - observation never stops training
        _warn(f"system metrics could not be started, training goes on: {error!r}")
        return False


def init_driver(
    experiment: str | None = None,
    run_name: str | None = None,
    *,
    tags: dict[str, str] | None = None,
) -> str:
    """Open the run in the process that starts the workers; returns its id for `prepare_worker`.

    Programs started from here (torchrun, srun) find it in their environment; a Ray cluster needs
    it in the workers' configuration or as `runtime_env` with `worker_env()`.
    """
    import mlflow

    _drop_switch()
    if experiment is not None:
        mlflow.set_experiment(experiment)
    run = mlflow.active_run() or mlflow.start_run(run_name=run_name, tags=tags)
    run_id = str(run.info.run_id)
    _owned.add(run_id)
    os.environ[RUN_ID_ENV] = run_id
    os.environ["MLFLOW_TRACKING_URI"] = mlflow.get_tracking_uri()
    _register_exit()
    return run_id


def worker_env() -> dict[str, str]:
    """What workers on other machines need in their environment to find the driver's run."""
    logins = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    names = (RUN_ID_ENV, "MLFLOW_TRACKING_URI", *logins)
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def prepare_worker(run_id: str | None = None, *, tracking_uri: str | None = None) -> str | None:
    """Attach this worker to the driver's run; its end stays the driver's. Returns the run's id."""
    _drop_switch()
    known = run_id or os.environ.get(RUN_ID_ENV) or os.environ.get("MLFLOW_RUN_ID")
    if not known:
        _warn("this worker was told no run: give prepare_worker the id that init_driver returned")
        return None
    try:
        return _attach(known, tracking_uri)
    except Exception as error:  # noqa: BLE001 - observation never stops training
        _warn(f"this worker could not be attached to run {known}, training goes on: {error!r}")
        return None


def start_run(**kwargs: Any) -> Any:
    """Open the run, from any rank: rank 0 opens or resumes it, the others attach to it.

    Takes what `mlflow.start_run` takes. The result shows the run's `info` and `data` and can stand
    in a `with`, which ends as `end_run` does. A rank that no run is known to gets one that does
    nothing: one run per rank would be worse than none.
    """
    import mlflow

    from dure_sdk.ranks import current

    _drop_switch()
    asked, driven = kwargs.get("run_id"), os.environ.get(RUN_ID_ENV)
    if current().rank == 0 and (not driven or asked not in {None, driven}):
        run = mlflow.start_run(**kwargs)
        _owned.add(str(run.info.run_id))
        _register_exit()
        return _OpenRun(run)
    prepare_worker(asked)
    return _OpenRun(mlflow.active_run())


class _OpenRun:
    """MLflow's open run (or none), whose `with` ends in our order and not in MLflow's."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def __enter__(self) -> _OpenRun:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *error: object) -> None:
        end_run("FINISHED" if error[0] is None else "FAILED")


def end_run(status: str = "FINISHED", *, limit_s: float = STOP_LIMIT_S) -> None:
    """Take the last sample, send what is left, end the run. Bounded, whatever the server does.

    A worker that is only attached leaves the run open for the process that opened it.
    """
    import time

    end_s = time.monotonic() + limit_s
    global _prepared  # noqa: PLW0603 - see below
    _prepared = None
    try:
        answers = _stop_session(limit_s)
        _finish(status, answers, end_s)
    except Exception as error:  # noqa: BLE001 - observation never stops training
        _warn(f"the run could not be ended in order: {error!r}")


def preflight(**kwargs: Any) -> Preflight:
    """What a job would record: series, rows an hour, charts. See `dure_sdk.preflight.expect`."""
    from dure_sdk.preflight import expect

    return expect(**kwargs)


def _enable(
    all_workers: bool,
    interval: float | None,
    samples: int | None,
    run_id: str | None,
    tracking_uri: str | None,
) -> bool:
    global _session  # noqa: PLW0603 - one monitor per process is the point
    from dure_sdk import mlflow_state

    mlflow = mlflow_state.loaded()
    if mlflow is None:
        return False
    known = run_id or mlflow_state.active_run_id() or _prepared
    if not known:
        return False
    from dure_sdk.ranks import current
    from dure_sdk.session import Asked, Session, node_name
    from dure_sdk.timing import timing

    if _session is not None and _session.run_id == known and _session.alive:
        _say(f"system metrics of run {known} are recorded already; this call is ignored")
        return True
    _stop_session(STOP_LIMIT_S)
    rank = current()
    times = timing(interval, samples, rank.pods if all_workers else 1)
    if rank.rank == 0:
        for line in times.lines:
            _say(line)
    if rank.rank != 0 and not all_workers:
        return False
    uri = tracking_uri or mlflow.get_tracking_uri()
    _session = Session(Asked(known, uri, rank, all_workers, times, node_name()))
    _session.start()
    _register_exit()
    return _session.monitor is not None


def _attach(run_id: str, tracking_uri: str | None) -> str:
    global _prepared  # noqa: PLW0603 - one run per process
    import mlflow

    from dure_sdk.transport import AwayError, transport

    if tracking_uri:
        mlflow.set_tracking_uri(tracking_uri)
    _prepared = run_id
    active = mlflow.active_run()
    if active is None or active.info.run_id != run_id:
        try:
            transport(mlflow.get_tracking_uri(), run_id).next_step("", ASK_LIMIT_S)
        except AwayError as error:
            # MLflow's own attempt would hold the worker for minutes.
            _warn(f"MLflow does not answer, run {run_id} is not opened in this worker ({error})")
            return run_id
        mlflow.start_run(run_id=run_id)
        _attached.add(run_id)
        _register_exit()
    return run_id


def _stop_session(limit_s: float) -> bool:
    """Stop and flush; whether the server took everything."""
    global _session
    session, _session = _session, None
    return session.stop(limit_s) if session is not None else True


def _finish(status: str, answers: bool, end_s: float) -> None:
    """The run's own end, asked of the server first with a time-out of ours."""
    import time

    from dure_sdk import mlflow_state
    from dure_sdk.transport import HttpTransport, transport

    mlflow = mlflow_state.loaded()
    run_id = mlflow_state.active_run_id()
    if mlflow is None or run_id is None:
        return
    if run_id in _attached and run_id not in _owned:
        mlflow_state.detach(run_id)
        _attached.discard(run_id)
        return
    channel = transport(mlflow.get_tracking_uri(), run_id)
    if isinstance(channel, HttpTransport):
        limit_s = min(max(end_s - time.monotonic(), 0.1), 10.0) if answers else 0.5
        try:
            channel.finish(status, limit_s)
        except Exception as error:  # noqa: BLE001 - MLflow's own call would wait for minutes
            mlflow_state.detach(run_id)
            _warn(f"MLflow does not answer: run {run_id} stays open there ({error})")
            return
    mlflow.end_run(status)
    if os.environ.get(RUN_ID_ENV) == run_id:
        del os.environ[RUN_ID_ENV]


def _register_exit() -> None:
    """At exit: a program that only uses MLflow's own calls still gets its last sample."""
    global _exit_registered  # noqa: PLW0603 - see above
    if not _exit_registered:
        import atexit

        # Registered after MLflow's own, so it runs before it.
        atexit.register(_at_exit)
        _exit_registered = True


def _at_exit() -> None:
    from dure_sdk import mlflow_state

    try:
        _stop_session(STOP_LIMIT_S)
        for run_id in list(_attached - _owned):
            mlflow_state.detach(run_id)
    except Exception as error:  # noqa: BLE001 - an interpreter that ends is not stopped
        _warn(f"system metrics could not be ended in order: {error!r}")


def _drop_switch() -> None:
    from dure_sdk import mlflow_state

    if mlflow_state.drop_switch():
        _say(
            f"{mlflow_state.SWITCH} was removed from the environment: "
            "it starts one monitor in every process; call enable_system_metrics instead"
        )


def _say(text: str) -> None:
    from dure_sdk.notices import say

    say(text)


def _warn(text: str) -> None:
    from dure_sdk.notices import warn

    warn(text)
