"""A folder in which no machine could start the job is refused at once, not five times later."""

from __future__ import annotations

import pytest

from dure.adapters.compute.simulated import SimulatedBackend
from dure.core.errors import DureError, ErrorCode
from dure.engine import preview
from tests.core.build import R4090, node, request
from tests.story import Story


class Strict(SimulatedBackend):
    """A backend that knows which folders its jobs may see."""

    def workdir_refusal(self, workdir: str, unix_uid: int) -> str:
        return "" if workdir == "/own" else f"workdir {workdir} may not be shown"


def strict() -> Story:
    s = Story([node("n1", (R4090, 1))])
    s.backend.__class__ = Strict
    return s


def test_submit_and_preview_refuse_it_with_the_machine_s_words() -> None:
    s = strict()
    for ask in (
        lambda: s.submit("job", "BCG", workdir="/etc"),
        lambda: preview.preview(s.engine, s.user("bcg"), request(workdir="/etc"), "en"),
    ):
        with pytest.raises(DureError, match="may not be shown") as refused:
            ask()
        assert refused.value.code is ErrorCode.INVALID_REQUEST
        assert refused.value.params["field"] == "workdir"
    s.submit("job", "BCG", workdir="/own")
    assert s.state("job") == "RUNNING"


def test_a_backend_that_cannot_say_so_takes_the_job() -> None:
    s = Story([node("n1", (R4090, 1))])
    s.submit("job", "BCG", workdir="/etc")
    assert s.state("job") == "RUNNING"
