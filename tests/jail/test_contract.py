"""The backend's whole contract once more, with every job in a jail."""

from __future__ import annotations

import pytest

from tests.contract.backends import replace
from tests.contract.test_backend import *  # noqa: F403 - the suite is the same
from tests.jail.rigs import IS_ROOT, JailRig


@pytest.fixture(params=["bubblewrap", "bubblewrap-root"] if IS_ROOT else ["bubblewrap"])
def rig(request, make) -> JailRig:
    """As in the suite; here each order names the user that the job becomes."""
    made = make(request.param)
    launch = made.backend.launch
    made.backend.launch = lambda orders: launch([replace(o, unix_uid=made.uid) for o in orders])
    return made
