"""What a submit would do, by the planner's own code on a line with one job more."""

from __future__ import annotations

from typing import cast

from dure import wire
from dure.core.errors import DureError, ErrorCode
from dure.core.explain import PlacementNote
from dure.core.model import JobRequest, JobState, JobView, Lab, User
from dure.core.placement import PlacementView, failed_constraint
from dure.core.plan import Dispatch, Snapshot
from dure.core.scheduler import plan
from dure.engine import forecast, render
from dure.engine.commands import check_request, narrowest, request_shape
from dure.engine.engine import Engine
from dure.engine.queries import slots_of
from dure.engine.work import Work
from dure.engine.world import WHAT_IF
from dure.ports import Writes


def preview(
    engine: Engine, actor: User, request: JobRequest, lang: str, *, hold: bool = False
) -> wire.PreviewOut:
    """Say what a submit would do, or raise what it would raise. Nothing changes."""
    now_ms = engine.clock.now_ms()
    with engine.store.read() as tx:
        lab = tx.lab(request.lab)
        slots = slots_of(engine, tx, actor)
        # Only looks at the pool and the request: no write is reached.
        work = Work(cast("Writes", tx), engine.world, now_ms)
        check_request(engine, work, actor, lab, request)
        most = narrowest(
            engine.policy.waiting_per_user,
            lab.limits.waiting if lab else None,
            actor.limits.waiting,
        )
        if tx.waiting_count(actor.name) >= most:
            raise DureError(ErrorCode.QUEUE_LIMIT, limit=most)
    imagined = _view(actor, request, now_ms)
    snapshot, rank = _imagine(engine, imagined)
    shape = request_shape(request)
    made = plan(snapshot, engine.policy)
    planned = any(isinstance(d, Dispatch) and d.job == WHAT_IF for d in made.decisions)
    free = slots.used < slots.limit and not hold and request.not_before_ms <= now_ms
    views = [v for v in snapshot.placements if failed_constraint(shape, v) is None]
    costs = {v.tier.name: request.num_gpus * v.tier.mtflops * 3_600_000 for v in views}
    return wire.PreviewOut(
        fits=[_fitting(v) for v in views],
        starts_now=free and planned,
        ahead=max(0, (rank or 1) - 1),
        slots_used=slots.used,
        slots_limit=slots.limit,
        cost_per_hour_tflop_s={t: render.tflop_s(c) for t, c in sorted(costs.items())},
        lab_usage_tflop_s=render.usage(
            lab or Lab(name=request.lab), now_ms, engine.policy.half_life_ms
        ),
        eta=None if planned or not free else _eta(engine, imagined, now_ms, lang),
    )


def _eta(engine: Engine, imagined: JobView, now_ms: int, lang: str) -> wire.EtaOut | None:
    """When the job would start, if it got a slot at once."""
    forecast.look_ahead(engine)
    return render.eta_out(forecast.imagined(engine, imagined), lang, now_ms)


def _fitting(view: PlacementView) -> wire.PlacementNoteOut:
    return render.note_out(
        PlacementNote(
            node=view.id.node,
            tier=view.id.tier,
            idle=view.idle,
            capacity=view.capacity,
            in_service=view.in_service,
            fits=True,
        )
    )


def _view(actor: User, request: JobRequest, now_ms: int) -> JobView:
    return JobView(
        id=WHAT_IF,
        lab=request.lab,
        user=actor.name,
        state=JobState.GLOBAL_QUEUE_WAIT,
        shape=request_shape(request),
        entered_ms=now_ms,
    )


def _imagine(engine: Engine, imagined: JobView) -> tuple[Snapshot, int | None]:
    """Snapshot and rank with the job in the line; it leaves before anybody can see it."""
    world = engine.world
    with world.lock:
        world.index.put(imagined)
        try:
            snapshot = world.index.snapshot(world.pool, cycle=0, phase=world.phase)
            return snapshot, world.index.rank(WHAT_IF, world.pool)
        finally:
            world.index.remove(WHAT_IF)
