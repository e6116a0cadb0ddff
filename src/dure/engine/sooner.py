"""What would start a waiting job sooner: the planner is asked about changed requests.

Only changes that the job's own limits allow: a VRAM floor that an OOM has raised stays.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dure.core.model import Job, JobView, PlacementId, Shape, Value
from dure.core.placement import fits
from dure.core.plan import Dispatch
from dure.core.scheduler import plan
from dure.engine.engine import Engine


class Hint(Value, frozen=True, kw_only=True):
    """One change of the request with which the job would start in the next cycle."""

    change: str
    value: str | int | float
    placement: PlacementId


def hints(engine: Engine, job: Job) -> list[Hint]:
    """Changes that would start `job` now, least change first; at most one of each kind."""
    world = engine.world
    with world.lock:
        view = world.index.view(job.id)
        if view is None or not world.index.is_ranked(job.id, world.pool):
            return []
    found: list[Hint] = []
    for change, value, shape in _variants(job, view):
        if any(h.change == change for h in found):
            continue
        placement = _starts_at(engine, view, shape)
        if placement is not None:
            found.append(Hint(change=change, value=value, placement=placement))
    return found


def _variants(job: Job, view: JobView) -> Iterator[tuple[str, str | int | float, Shape]]:
    shape = view.shape
    replace = msgspec.structs.replace
    if shape.node is not None:
        yield "node", "", replace(shape, node=None)
    if shape.tiers:
        yield "tiers", "", replace(shape, tiers=())
    if job.request.min_vram_gb > job.floor_gb:
        yield "min_vram_gb", job.floor_gb, replace(shape, floor_gb=job.floor_gb)
    for count in range(shape.num_gpus - 1, 0, -1):
        yield "num_gpus", count, replace(shape, num_gpus=count)


def _starts_at(engine: Engine, view: JobView, shape: Shape) -> PlacementId | None:
    """Where the job would start in the next cycle if it had this shape.

    Rule: what is put back is what stood there under this same lock; the job may have been
    cancelled or dispatched since anybody looked.
    """
    world = engine.world
    with world.lock:
        now = world.index.view(view.id)
        places = world.pool.views(world.index.now_ms)
        if now is None or not any(fits(shape, v) and v.idle for v in places):
            return None
        # A changed request gives up a reservation that it does not need any more.
        world.index.put(msgspec.structs.replace(now, shape=shape, reservation=None))
        try:
            snapshot = world.index.snapshot(world.pool, cycle=0, phase=world.phase)
        finally:
            world.index.put(now)
    made = plan(snapshot, engine.policy)
    return next(
        (d.placement for d in made.decisions if isinstance(d, Dispatch) and d.job == view.id), None
    )
