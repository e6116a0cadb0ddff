from __future__ import annotations

import pytest

from tests.e2e.site import Site


@pytest.fixture
def plain_site(tmp_path):
    """Without a jail: its jobs tell their process ids as the machine numbers them."""
    made = Site(tmp_path, runtime="process")
    made.start()
    yield made
    made.close()


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    made.start()
    yield made
    made.close()
