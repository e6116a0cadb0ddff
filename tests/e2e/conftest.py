from __future__ import annotations

import pytest

from tests.e2e.site import Site


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    made.start()
    yield made
    made.close()
