"""Where real traces lie: beside the checkout, or where SIM_TRACES says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "traces" / "cluster.json"
TRACES = Path(os.environ.get("SIM_TRACES") or ROOT.parent / "shared" / "traces")

real_traces = pytest.mark.skipif(
    not TRACES.exists(), reason="real traces are not beside the checkout: their checks are left out"
)
