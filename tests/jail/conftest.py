from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jail.rigs import JailRig

KINDS = ("bubblewrap", "bubblewrap-root", "apptainer")


@pytest.fixture
def make() -> Iterator[Callable[..., JailRig]]:
    """Rigs by kind; each must leave nothing behind."""
    made: list[tuple[JailRig, Path]] = []

    def build(kind: str, **confinement: object) -> JailRig:
        folder = Path(tempfile.mkdtemp(prefix="dure-jail-", dir="/var/tmp"))
        made.append((JailRig(kind, folder, **confinement), folder))
        return made[-1][0]

    yield build
    for rig, folder in made:
        rig.close()
        shutil.rmtree(folder)


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, make: Callable[..., JailRig]) -> JailRig:
    return make(request.param)
