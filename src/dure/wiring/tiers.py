"""Tiers of GPUs that need no configuration: FP32 TFLOPS and memory of the maker's data sheets.

A lab's administrator may change every number (`dure admin tier set`); these only save the
first evening.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dure.core.model import Node, Tier, TierId
from dure.settings import DeclaredTier

# name: (GB, TFLOPS FP32, sort_order)
KNOWN: dict[str, tuple[float, float, int]] = {
    "B200": (180, 80.0, 95),
    "H200": (141, 67.0, 90),
    "H100": (80, 67.0, 85),
    "A100-80GB": (80, 19.5, 80),
    "A100-40GB": (40, 19.5, 70),
    "L40S": (48, 91.6, 65),
    "RTX6000Ada": (48, 91.1, 60),
    "RTXA6000": (48, 38.7, 55),
    "RTX5090": (32, 104.8, 50),
    "RTX4090": (24, 82.6, 40),
    "RTX3090Ti": (24, 40.0, 36),
    "RTX3090": (24, 35.6, 35),
    "RTX4080": (16, 48.7, 30),
    "RTX3080Ti": (12, 34.1, 25),
    "RTX3080": (10, 29.8, 20),
    "V100": (32, 15.7, 18),
    "T4": (16, 8.1, 10),
}


def declared(tiers: Iterable[DeclaredTier]) -> dict[str, Tier]:
    """Tiers as the settings file names them."""
    return {
        t.name: Tier(
            name=TierId(t.name),
            vram_gb=t.vram_gb,
            mtflops=round(t.tflops * 1000),
            sort_order=t.sort_order,
            max_gpus=t.max_gpus,
        )
        for t in tiers
    }


def missing_tiers(node: Node, existing: Iterable[str], named: Mapping[str, Tier]) -> list[Tier]:
    """Tiers to make for a node's GPUs: from the settings, else from the known list."""
    have = set(existing)
    made = []
    for name in sorted({g.tier for g in node.gpus} | set(named)):
        if name in have:
            continue
        spec = KNOWN.get(name) or next((v for k, v in KNOWN.items() if name.startswith(k)), None)
        if name in named:
            made.append(named[name])
        elif spec is not None:
            gb, tflops, order = spec
            made.append(
                Tier(name=TierId(name), vram_gb=gb, mtflops=round(tflops * 1000), sort_order=order)
            )
    return made
