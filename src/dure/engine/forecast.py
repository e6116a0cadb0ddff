"""Looks ahead: the planner rehearsed over the owners' past run times, at most every 30 s.

The first jobs of the line are forecast; whoever stands far behind has no number, because
new jobs with better rank will come. Nothing here decides anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import msgspec
import structlog

from dure.core.forecast import (
    NEVER_MS,
    Calibration,
    Forecast,
    calibration,
    forecast,
    share_of,
)
from dure.core.model import Attempt, Job, JobId, JobState, JobView, Lab, Outcome, Phase
from dure.core.placement import Pool
from dure.core.rehearsal import Rehearsal, Running, Start
from dure.core.runtimes import RunTimes
from dure.engine.engine import Engine
from dure.ports import Reads

log = structlog.get_logger("dure.forecast")
PERIOD_MS = 30_000
JOBS = 100
"""Ranked jobs that are forecast."""
FAR = 1000
"""Ranked jobs that are rehearsed for one that is asked about; beyond, no number is honest."""
SCENARIOS = 11
MAX_CYCLES = 400
MAX_LOOKS = 60_000
"""Cycles of one scenario, and placements looked at in them: bounds what a look ahead may cost
(about two seconds of one core every 30 s with a thousand nodes; then fewer jobs get a number).
"""
SCORED_FOR_MS = 30 * 86_400_000
_CLEAN = frozenset({Outcome.COMPLETED, Outcome.ERROR, Outcome.TIMED_OUT})
"""Ends that tell how long such a job runs."""


class Scene(msgspec.Struct, frozen=True):
    """Frozen values to rehearse on, copied from the world in one go."""

    now_ms: int
    pool: Pool
    labs: tuple[Lab, ...]
    views: tuple[JobView, ...]
    attempts: tuple[Attempt, ...]
    jobs: Mapping[JobId, Job]
    run_times: RunTimes

    def run_ms(self, job: Job, share: float, started_ms: int | None = None) -> int:
        """Expected whole run time at a quantile; NEVER_MS if nobody knows."""
        limit_s = job.request.time_limit_s
        found = self.run_times.quantile_ms(
            job.user,
            job.lab,
            job.request.num_gpus,
            share=share,
            elapsed_ms=max(0, self.now_ms - started_ms) if started_ms else 0,
            limit_ms=limit_s * 1000 if limit_s is not None else None,
        )
        return NEVER_MS if found is None else found


def look_ahead(engine: Engine) -> None:
    """Make new forecasts if the newest are old, store first ones, and score what started."""
    outlook = engine.outlook
    if not outlook.lock.acquire(blocking=False):
        return
    try:
        now_ms = engine.clock.now_ms()
        if 0 <= now_ms - outlook.made_ms < PERIOD_MS and outlook.made_ms >= 0:
            return
        with engine.store.read() as tx:
            _learn(engine, tx)
        scene = scene_of(engine, JOBS)
        outlook.forecasts = _all(engine, scene)
        outlook.ends_ms = ends(scene)
        outlook.made_ms = scene.now_ms
        _store(engine, outlook.forecasts)
    finally:
        outlook.lock.release()


def scene_of(engine: Engine, jobs: int, *more: JobView) -> Scene:
    """Copy what a rehearsal needs: the first `jobs` of the line, and `more` that are imagined."""
    world = engine.world
    with engine.store.read() as tx:
        with world.lock:
            normal = world.phase is Phase.NORMAL
            ranked = islice(world.index.ranked(world.pool), jobs) if normal else ()
            views = {v.id: v for v in (*ranked, *more)}
            pool, labs = world.pool.copy(), tuple(world.labs.values())
        attempts = tuple(a for a in tx.open_attempts() if (a.job, a.epoch) in pool.leases)
        known = tx.jobs([*views, *(a.job for a in attempts)])
    return Scene(
        now_ms=engine.clock.now_ms(),
        pool=pool,
        labs=labs,
        views=tuple(v for v in views.values() if v.id in known or v in more),
        attempts=attempts,
        jobs=known,
        run_times=engine.outlook.run_times,
    )


def _learn(engine: Engine, tx: Reads) -> None:
    """Take in the runs that ended since the last look."""
    outlook = engine.outlook
    ended = tx.ended_attempts(after_ms=outlook.learnt_to_ms)
    jobs = tx.jobs({a.job for a in ended})
    for attempt in ended:
        assert attempt.ended_ms is not None
        outlook.learnt_to_ms = max(outlook.learnt_to_ms, attempt.ended_ms)
        job = jobs.get(attempt.job)
        if job is not None and attempt.started_ms is not None and attempt.outcome in _CLEAN:
            run_ms = attempt.ended_ms - attempt.started_ms
            outlook.run_times.note(job.user, attempt.lab, len(attempt.gpus), run_ms)


def rehearse(
    engine: Engine, scene: Scene, scenario: int, scenarios: int, wanted: Iterable[JobId]
) -> Mapping[JobId, Start]:
    """One scenario: every job runs as long as its quantile says."""
    rehearsal = Rehearsal(engine.policy, scene.pool, scene.labs, scene.now_ms)
    for attempt in scene.attempts:
        job = scene.jobs.get(attempt.job)
        started_ms = attempt.started_ms or attempt.dispatched_ms
        run_ms = NEVER_MS
        if job is not None:
            run_ms = scene.run_ms(job, share_of(job.id, scenario, scenarios), started_ms)
        lease = scene.pool.leases[attempt.job, attempt.epoch]
        rehearsal.running(
            Running(
                lease=lease,
                lab=attempt.lab,
                mtflops=attempt.mtflops,
                started_ms=started_ms,
                ends_ms=max(scene.now_ms + 1000, started_ms + run_ms),
            )
        )
    for view in scene.views:
        known = scene.jobs.get(view.id)
        share = share_of(view.id, scenario, scenarios)
        rehearsal.waiting(view, scene.run_ms(known, share) if known else NEVER_MS)
    places = max(1, len(scene.pool.views(scene.now_ms)))
    return rehearsal.run(wanted, max(20, min(MAX_CYCLES, MAX_LOOKS // places)))


def ends(scene: Scene) -> dict[JobId, int | None]:
    """When each running job is expected to end, at the median."""
    found: dict[JobId, int | None] = {}
    for attempt in scene.attempts:
        job = scene.jobs.get(attempt.job)
        started_ms = attempt.started_ms or attempt.dispatched_ms
        run_ms = scene.run_ms(job, 0.5, started_ms) if job is not None else NEVER_MS
        known = run_ms < NEVER_MS
        found[attempt.job] = max(scene.now_ms, started_ms + run_ms) if known else None
    return found


def _all(engine: Engine, scene: Scene) -> dict[JobId, Forecast]:
    if not scene.views:
        return {}
    wanted = [v.id for v in scene.views]
    runs = [rehearse(engine, scene, s, SCENARIOS, wanted) for s in range(SCENARIOS)]
    made = (_of(v, scene.now_ms, runs) for v in scene.views)
    return {f.job: f for f in made if f is not None}


def _of(view: JobView, now_ms: int, runs: Sequence[Mapping[JobId, Start]]) -> Forecast | None:
    starts = [run.get(view.id) for run in runs]
    return forecast(view.id, view.entered_ms, now_ms, starts)


def imagined(engine: Engine, view: JobView) -> Forecast | None:
    """The band of a job that is not in the line, or far behind: all before it are rehearsed."""
    if engine.world.phase is not Phase.NORMAL:
        return None
    scene = scene_of(engine, FAR, view)
    runs = [rehearse(engine, scene, s, SCENARIOS, [view.id]) for s in range(SCENARIOS)]
    return _of(view, scene.now_ms, runs)


class Lookout:
    """Looks ahead now and then in a thread of its own, while anybody waits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dure-lookout", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current look."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_MS / 1000):
            try:
                look_ahead(self._engine)
            except Exception:
                # Loop top: a forecast is a help, never a reason to stop.
                log.exception("look_ahead_failed")


# -- kept and scored -----------------------------------------------------------------


def _store(engine: Engine, made: Mapping[JobId, Forecast]) -> None:
    """Keep the first forecast of each entry, and fill in what came true of earlier ones."""
    with engine.store.read() as tx:
        unscored = tx.open_forecasts()
        scored = [s for f in unscored if (s := _score(tx, f)) is not None]
        have = {(f.job, f.entered_ms) for f in tx.forecasts_of(made)}
    first = [f for f in made.values() if (f.job, f.entered_ms) not in have]
    if first or scored:
        with engine.store.write() as tx:
            tx.put_forecasts([*first, *scored])


def _score(tx: Reads, made: Forecast) -> Forecast | None:
    job = tx.job(made.job)
    if job is None:
        return msgspec.structs.replace(made, started_ms=0)
    starts = [
        a.started_ms
        for a in tx.attempts(made.job)
        if a.started_ms is not None and a.dispatched_ms >= made.made_ms
    ]
    if starts:
        return msgspec.structs.replace(made, started_ms=min(starts))
    still = job.entered_ms == made.entered_ms and job.state in _MAY_START
    return None if still else msgspec.structs.replace(made, started_ms=0)


_MAY_START = frozenset({JobState.GLOBAL_QUEUE_WAIT, JobState.NODE_WAIT, JobState.DISPATCHED})


def calibrated(engine: Engine) -> Calibration:
    """Score of the forecasts of the last 30 days."""
    with engine.store.read() as tx:
        return calibration(tx.forecasts(since_ms=engine.clock.now_ms() - SCORED_FOR_MS))
