from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from tools.slurm_testbed import NodeSpec, Testbed, unavailable

WHY = unavailable()


@contextmanager
def made(*nodes: NodeSpec, **options: object):
    """A testbed in a folder that jobs of other accounts can reach."""
    if WHY:
        pytest.skip(f"no real Slurm: {WHY}")
    folder = Path(tempfile.mkdtemp(prefix="dure-slurm-")).resolve()
    bed = Testbed(folder, nodes, **options)
    try:
        with bed:
            yield bed
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_bed():
    """One cluster for tests that leave it as it was: one node with four GPUs."""
    with made(NodeSpec("here", gpus=4)) as bed:
        yield bed


@pytest.fixture
def own_bed():
    """A cluster of two nodes that a test may break."""
    nodes = (NodeSpec("here", gpus=2), NodeSpec("there", gpus=2))
    with made(*nodes, slurmd_timeout_s=5) as bed:
        yield bed
