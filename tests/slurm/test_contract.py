"""The contract of compute backends on a real Slurm: the same tests as for the others."""

from __future__ import annotations

import pytest

from tests.contract.test_backend import *  # noqa: F403 - every test of the suite
from tests.slurm.rig import SlurmRig


@pytest.fixture
def rig(shared_bed):
    made = SlurmRig(shared_bed)
    yield made
    made.close()
