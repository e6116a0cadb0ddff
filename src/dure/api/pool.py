"""Routes of the pool: tiers, nodes, the line, maintenance, health, the contract itself."""

from __future__ import annotations

import msgspec

from dure import __version__, wire
from dure.api.auth import Access
from dure.api.caching import edit_tag
from dure.api.jobs import PageQuery, next_link
from dure.api.routing import Call, Reply, Routes
from dure.core.errors import ErrorCode
from dure.core.model import NodeId, Tier, TierId
from dure.engine import admin, forecast, poolview, queries, render

C = ErrorCode
routes = Routes("pool")
EDIT = (C.PRECONDITION_REQUIRED, C.STALE_EDIT)


@routes.add("GET", "/healthz", wire.HealthOut, access=Access.ANYBODY, refuses=(C.STORE_FAILED,))
def healthz(call: Call) -> Reply:
    """Say whether this server answers, its store can be read and its loop is alive."""
    with call.engine.store.read() as tx:
        tx.phase()
    loop = call.api.controller
    status = "degraded" if loop is not None and loop.died else "ok"
    now_ms = call.engine.clock.now_ms()
    return Reply(wire.HealthOut(status=status, version=__version__, as_of_ms=now_ms))


@routes.add("GET", "/v1/maintenance/status", wire.MaintenanceOut, access=Access.ANYBODY)
def show_maintenance(call: Call) -> Reply:
    """Show the maintenance phase."""
    return Reply(wire.MaintenanceOut(phase=call.engine.world.phase))


@routes.add(
    "PUT",
    "/v1/maintenance",
    wire.MaintenanceOut,
    access=Access.ADMIN,
    refuses=(C.WRONG_STATE,),
)
def set_maintenance(call: Call, body: wire.MaintenanceIn) -> Reply:
    """Begin (DRAINING), end or abort (NORMAL) maintenance."""
    phase = admin.set_phase(call.engine, call.actor.name, body.phase)
    return Reply(wire.MaintenanceOut(phase=phase))


@routes.add("GET", "/v1/queue", wire.QueueOut)
def show_queue(call: Call, query: PageQuery) -> Reply:
    """Show the line: labs in order, jobs in order, and why each one waits."""
    line = queries.queue(call.engine, call.lang, query.limit, query.cursor)
    pairs = [("limit", str(query.limit))]
    headers = next_link("/v1/queue", line.next, pairs)
    return Reply(line, headers=headers, stamp=queries.usage_stamp(call.engine))


@routes.add("GET", "/v1/pool", wire.PoolOut)
def show_pool(call: Call) -> Reply:
    """Show every GPU by what it does now, by tier and by node."""
    return Reply(poolview.pool(call.engine))


# -- tiers ---------------------------------------------------------------------------


@routes.add("GET", "/v1/tiers", wire.TierList)
def list_tiers(call: Call) -> Reply:
    """List all tiers, best first."""
    return Reply(poolview.tiers(call.engine))


@routes.add("GET", "/v1/tiers/{tier}", wire.TierOut, refuses=(C.NOT_FOUND,))
def show_tier(call: Call, tier: str) -> Reply:
    """Show one tier."""
    return _tier(poolview.tier(call.engine, TierId(tier)))


def _tier(tier: Tier) -> Reply:
    return Reply(render.tier_out(tier), edit=edit_tag(tier))


@routes.add("PUT", "/v1/tiers/{tier}", wire.TierOut, access=Access.ADMIN, refuses=EDIT, edits=True)
def put_tier(call: Call, tier: str, body: wire.TierIn) -> Reply:
    """Add or change a tier; what runs keeps the rate of its dispatch."""
    new = Tier(
        name=TierId(tier),
        vram_gb=body.vram_gb,
        mtflops=round(body.tflops * 1000),
        sort_order=body.sort_order,
        max_gpus=body.max_gpus,
        active=body.active,
    )
    return _tier(admin.put_tier(call.engine, call.actor.name, new, call.expectation.check))


@routes.add(
    "DELETE",
    "/v1/tiers/{tier}",
    None,
    status=204,
    access=Access.ADMIN,
    refuses=(C.NOT_FOUND, C.IN_USE, *EDIT),
    edits=True,
)
def remove_tier(call: Call, tier: str) -> Reply:
    """Remove a tier that no node has."""
    admin.remove_tier(call.engine, call.actor.name, TierId(tier), call.expectation.check)
    return Reply()


# -- forecasts -----------------------------------------------------------------------


@routes.add("GET", "/v1/forecasts/calibration", wire.CalibrationOut, access=Access.ADMIN)
def show_calibration(call: Call) -> Reply:
    """Show how often starts of the last 30 days fell inside their forecast band."""
    score = forecast.calibrated(call.engine)
    return Reply(
        wire.CalibrationOut(
            scored=score.scored,
            inside=score.inside,
            early=score.early,
            late=score.late,
            inside_share=score.inside_share,
            days=forecast.SCORED_FOR_MS // 86_400_000,
        )
    )


# -- nodes ---------------------------------------------------------------------------


@routes.add("GET", "/v1/nodes", wire.NodeList)
def list_nodes(call: Call) -> Reply:
    """List all nodes with their GPUs."""
    return Reply(poolview.nodes(call.engine))


@routes.add("GET", "/v1/nodes/{node}", wire.NodeOut, refuses=(C.NOT_FOUND,))
def show_node(call: Call, node: str) -> Reply:
    """Show one node."""
    found, out = poolview.node(call.engine, NodeId(node))
    return Reply(out, edit=edit_tag(found))


@routes.add(
    "PATCH",
    "/v1/nodes/{node}",
    wire.NodeOut,
    access=Access.ADMIN,
    refuses=(C.NOT_FOUND, *EDIT),
    edits=True,
)
def edit_node(call: Call, node: str, body: wire.NodePatch) -> Reply:
    """Take a node out of service or back; `force` also stops what runs there."""
    name = NodeId(node)
    if body.drained is msgspec.UNSET:
        drained = poolview.node(call.engine, name)[0].drained
    else:
        drained = body.drained
    admin.drain(
        call.engine,
        call.actor.name,
        name,
        drained=drained,
        reason=body.drain_reason,
        force=body.force,
        check=call.expectation.check,
    )
    found, out = poolview.node(call.engine, name)
    return Reply(out, edit=edit_tag(found))
