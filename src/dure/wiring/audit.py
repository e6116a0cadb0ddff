"""`dure audit`: recompute every lab's use from the attempts and prove each GPU-second once."""

from __future__ import annotations

import json
from decimal import Decimal

import click

from dure.adapters.store.sql import SqlStore
from dure.cli.texts import pick
from dure.core.invariants import World, check_world
from dure.core.model import CHARGED, MICRO_PER_TFLOP_S
from dure.ports import Reads
from dure.settings import Settings

_SUMMARY = (
    (
        "{jobs} jobs, {attempts} attempts, {lines} ledger lines: {charged:.1f} GPU-s charged, "
        "{off:.1f} GPU-s written off."
    ),
    (
        "작업 {jobs}개, 시도 {attempts}개, 장부 {lines}줄: {charged:.1f} GPU·초 과금, "
        "{off:.1f} GPU·초 비과금."
    ),
)
_CLOSES = (
    "every GPU-second held was charged or written off exactly once",
    "점유한 모든 GPU·초가 정확히 한 번 기록되었습니다",
)


def read_world(tx: Reads, now_ms: int, half_life_ms: float) -> World:
    """Everything the audit looks at, from one consistent view."""
    return World(
        jobs=tuple(tx.all_jobs()),
        attempts=tuple(tx.all_attempts()),
        ledger=tuple(tx.ledger()),
        labs=tuple(tx.labs()),
        now_ms=now_ms,
        half_life_ms=half_life_ms,
    )


def audit(settings: Settings, *, as_json: bool) -> int:
    """Print what was checked; return 0 when the account closes, 1 with the differences."""
    store = SqlStore(settings.database_url())
    try:
        with store.read() as tx:
            newest = tx.events(after=max(0, tx.last_event_id() - 1), limit=1)
            now_ms = newest[-1].at_ms if newest else 0
            world = read_world(tx, now_ms, settings.policy.half_life_ms)
    finally:
        store.close()
    broken = check_world(world)
    charged_ms = sum(e.gpu_ms for e in world.ledger if e.kind in CHARGED and e.job)
    written_off_ms = sum(e.gpu_ms for e in world.ledger if e.kind not in CHARGED)
    charged = Decimal(sum(e.cost_micro for e in world.ledger)) / MICRO_PER_TFLOP_S
    report = {
        "jobs": len(world.jobs),
        "attempts": len(world.attempts),
        "ledger_lines": len(world.ledger),
        "charged_gpu_s": charged_ms / 1000,
        "written_off_gpu_s": written_off_ms / 1000,
        "charged_tflop_s": str(charged),
        "violations": [{"invariant": v.invariant, "detail": v.detail} for v in broken],
    }
    if as_json:
        click.echo(json.dumps(report))
        return 1 if broken else 0
    numbers = {
        "jobs": len(world.jobs),
        "attempts": len(world.attempts),
        "lines": len(world.ledger),
        "charged": charged_ms / 1000,
        "off": written_off_ms / 1000,
    }
    click.echo(pick(_SUMMARY).format(**numbers))
    for violation in broken:
        click.echo(f"✗ {violation.invariant}: {violation.detail}", err=True)
    if not broken:
        click.echo(f"✓ {pick(_CLOSES)}")
    return 1 if broken else 0
