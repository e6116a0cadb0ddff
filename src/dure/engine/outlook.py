"""What is expected of the near future, kept between two looks ahead."""

from __future__ import annotations

import threading

from dure.core.forecast import Forecast
from dure.core.model import JobId
from dure.core.runtimes import RunTimes


class Outlook:
    """Newest forecasts and the run times they rest on.

    Rule: `lock` is held only while a look ahead is made; readers take `forecasts` as it is.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.run_times = RunTimes()
        self.learnt_to_ms = 0
        self.made_ms = -1
        self.forecasts: dict[JobId, Forecast] = {}
        self.ends_ms: dict[JobId, int | None] = {}
        """When running jobs are expected to end, at the median; None: nobody knows."""
