"""`slots_borrow`: a limit never leaves GPUs idle while jobs wait in personal queues.

One job at a time, and only one that the planner would start in the next cycle: a borrowed
slot is never spent on waiting. Whoever has the fewest slots in use comes first, labs in order.
"""

from __future__ import annotations

from dure.core.model import Job, JobId, JobState, JobView, LabId, User, UserId
from dure.core.plan import Dispatch
from dure.core.queues import next_promotable
from dure.core.scheduler import plan
from dure.engine.engine import Engine
from dure.engine.world import view_of
from dure.ports import Reads

LOOKED_AT = 50
"""Users whose next job is tried in one turn."""


def lend_a_slot(engine: Engine) -> bool:
    """Promote one job beyond the limit if a GPU would stay idle otherwise."""
    if not engine.policy.slots_borrow or not _idle(engine):
        return False
    with engine.store.read() as tx:
        waiting = _next_jobs(engine, tx)
    chosen = next((job for job in waiting if _would_start(engine, job)), None)
    if chosen is None:
        return False
    with engine.change("lend") as work:
        job = work.job(chosen.id)
        if job is None or job.state is not JobState.PERSONAL_QUEUE_WAIT or job.held:
            return False
        return work.lend(job) is not None


def _idle(engine: Engine) -> bool:
    with engine.world.lock:
        return any(v.idle for v in engine.world.pool.views(engine.world.index.now_ms))


def _next_jobs(engine: Engine, tx: Reads) -> list[Job]:
    """Each user's next job, in the order in which slots are lent."""
    found: list[tuple[tuple[int, int, JobId], Job]] = []
    for name in tx.users_with_personal_jobs():
        job = next_promotable(tx.personal_queue(name), engine.clock.now_ms())
        if job is not None:
            used = tx.slots_used(UserId(name))
            with engine.world.lock:
                key = engine.world.index.lab_key(_lab(tx.user(name), job))
            found.append(((key, used, job.id), job))
    found.sort(key=lambda f: f[0])
    return [job for _, job in found[:LOOKED_AT]]


def _lab(user: User | None, job: Job) -> LabId:
    return user.lab if user is not None else job.lab


def _would_start(engine: Engine, job: Job) -> bool:
    world = engine.world
    with world.lock:
        view: JobView = view_of(job, world.index.now_ms)
        imagined = JobView(
            id=view.id,
            lab=view.lab,
            user=view.user,
            state=JobState.GLOBAL_QUEUE_WAIT,
            shape=view.shape,
            entered_ms=world.index.now_ms,
            eligible_ms=view.eligible_ms,
        )
        world.index.put(imagined)
        try:
            snapshot = world.index.snapshot(world.pool, cycle=0, phase=world.phase)
        finally:
            world.index.remove(view.id)
    made = plan(snapshot, engine.policy)
    return any(isinstance(d, Dispatch) and d.job == job.id for d in made.decisions)
