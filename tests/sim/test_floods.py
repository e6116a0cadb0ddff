"""The flood of a first arrival and the lab that starves, under both profiles (golden).

Lab C always has one-hour jobs waiting; lab A arrives after 6 h with long ones. Equal rights
are 16 GPUs each. Under lazy charging A's long jobs cost nothing until they end.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from dure.core.model import Gpu, Node, Tier
from dure.core.policy import PROFILES, Profile
from dure.sim.metrics import measure
from dure.sim.replay import Replay
from dure.sim.trace import Cluster, Trace, TraceJob

GOLDEN = Path(__file__).parent / "golden"
HOUR_S, DAYS = 3600, 10
TIER = Tier(name="T", vram_gb=24, mtflops=1000, sort_order=1, max_gpus=8)


class Row(msgspec.Struct):
    longest_h: float
    share: float
    jain_6h: float


def pool() -> Cluster:
    nodes = [
        Node(
            name=f"n{i}",
            backend="simulated",
            gpus=tuple(Gpu(index=k, tier=TIER.name) for k in range(8)),
            cores=32,
            memory_mib=65_536,
        )
        for i in range(4)
    ]
    return Cluster((TIER,), tuple(nodes), {})


def flood(long_h: int) -> Trace:
    rows = [("C", h * HOUR_S + 97 * k, HOUR_S) for h in range(DAYS * 24) for k in range(36)]
    rows += [("A", 6 * HOUR_S, long_h * HOUR_S)] * (64 + DAYS * 24 * 16 // long_h)
    rows.sort(key=lambda r: r[1])
    jobs = [
        TraceJob(id=i, name=f"j{i}", lab=lab, user=lab, submit_s=at, run_s=run, num_gpus=1)
        for i, (lab, at, run) in enumerate(rows, 1)
    ]
    return Trace(tuple(jobs), 0)


def row(long_h: int, profile: Profile) -> Row:
    """How long C had one GPU or none, of the ten days in which both labs wait."""
    result = Replay(flood(long_h), pool(), PROFILES[profile]).run()
    changes = [(r.start_s, 1) for r in result.ran if r.job.lab == "C"]
    changes += [(r.end_s, -1) for r in result.ran if r.job.lab == "C"]
    held, since, longest, total = 0, 0.0, 0.0, 0.0
    for at_s, change in sorted(changes, key=lambda c: (c[0], -c[1])):
        was_low, held = held <= 1, held + change
        if at_s > DAYS * 24 * HOUR_S:
            break
        if was_low and held > 1:
            longest, total = max(longest, at_s - since), total + at_s - since
        elif not was_low and held <= 1:
            since = at_s
    share = total / (DAYS * 24 * HOUR_S)
    return Row(longest / HOUR_S, share, measure(result).jain_6h)


def text(rows: dict[tuple[int, Profile], Row]) -> str:
    lines = ["C on one GPU or none: longest h, share of time, Jain 6 h"]
    for (long_h, profile), r in rows.items():
        what = f"{r.longest_h:6.1f} {r.share:6.2f} {r.jain_6h:6.3f}"
        lines.append(f"A's jobs {long_h:3} h  {profile.value:9} {what}")
    return "\n".join(lines) + "\n"


def test_a_first_arrival_cannot_flood_the_pool_under_balanced() -> None:
    rows = {(h, p): row(h, p) for h in (6, 24, 72) for p in Profile}
    for (long_h, profile), found in rows.items():
        if profile is Profile.CLASSIC:
            assert found.longest_h >= 0.8 * long_h
            assert found.share > 0.25
        else:
            assert found.longest_h <= 1
            assert found.jain_6h > 0.95
    path = GOLDEN / "flood.txt"
    if os.environ.get("DURE_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(rows), encoding="utf-8")
    assert text(rows) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("profile", "starves_h"), [("classic", (20, 30)), ("balanced", (0, 2.1))])
def test_a_lab_waits_for_as_long_as_others_run_only_under_classic(profile, starves_h) -> None:
    """The starved lab: A fills the pool at night, B comes in the morning with short jobs."""
    rows = [("A", 0, 24)] * 32 + [("A", 60, 24)] * 32 + [("C", 0, 2)] * 32
    rows += [("C", h * HOUR_S, 2) for h in range(1, 24) for _ in range(16)]
    rows += [("B", 8 * HOUR_S, 1)] * 60
    rows.sort(key=lambda r: r[1])
    jobs = tuple(
        TraceJob(id=i, name=f"j{i}", lab=lab, user=lab, submit_s=at, run_s=run * HOUR_S, num_gpus=1)
        for i, (lab, at, run) in enumerate(rows, 1)
    )
    found = measure(Replay(Trace(jobs, 0), pool(), PROFILES[Profile(profile)]).run())
    assert starves_h[0] <= found.starvation_h <= starves_h[1]
