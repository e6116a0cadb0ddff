"""What this process's MLflow knows by itself, without asking the server.

Rule: every undocumented place of MLflow that is read outside `collectors` and `transport` stands
here, and `tests/sdk/test_mlflow_contract.py` asserts each of them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"


def loaded() -> Any | None:
    """MLflow, if the program has imported it; importing it here would cost over a second."""
    return sys.modules.get("mlflow")


def active_run_id() -> str | None:
    """The run that is open in this thread."""
    mlflow = loaded()
    run = mlflow.active_run() if mlflow is not None else None
    return str(run.info.run_id) if run is not None else None


def open_run_ids() -> set[str] | None:
    """Runs that are open in any thread; None where this MLflow does not tell."""
    try:
        stacks = sys.modules["mlflow.tracking.fluent"]._active_run_stack.get_all_thread_values()
        return {str(run.info.run_id) for stack in list(stacks.values()) for run in list(stack)}
    except (KeyError, AttributeError, RuntimeError):
        return None


def detach(run_id: str) -> bool:
    """Forget the open run of this thread without writing its end: somebody else owns it."""
    try:
        stack = sys.modules["mlflow.tracking.fluent"]._active_run_stack.get()
    except (KeyError, AttributeError):
        return False
    if stack and stack[-1].info.run_id == run_id:
        stack.pop()
        return True
    return False


def stock_monitor_runs(run_id: str) -> bool:
    """Whether the user switched MLflow's own monitor on for this run."""
    fluent = sys.modules.get("mlflow.tracking.fluent")
    return run_id in getattr(fluent, "run_id_to_system_metrics_monitor", {})


def drop_switch() -> bool:
    """Remove MLflow's switch: it starts one monitor in every process, all with the same keys."""
    if os.environ.get(SWITCH, "").lower() not in {"true", "1"}:
        return False
    del os.environ[SWITCH]
    return True
