from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.site import Site, site


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made
