"""Environment of a job: its own variables, the user's, and little of the machine's. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dure.ports import Grant, LaunchOrder

BOOT = "adapters/runtime/inside/boot"
"""In the package: modules that every Python process of a job starts with."""


def of_job(
    base: Mapping[str, str], order: LaunchOrder, grant: Grant, *, package: str, uncaught: str
) -> dict[str, str]:
    """Base, then the user's variables, then the job's own, which nobody overrides."""
    own = {
        "JOB_ID": str(order.key.job),
        "JOB_ATTEMPT": str(order.start_no),
        "JOB_OUTPUT_DIR": grant.output_dir,
        "DURE_JOB_EPOCH": str(order.key.epoch),
        "DURE_UNCAUGHT": uncaught,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # Empty hides every GPU: a simulated slot must not touch a real one.
        "CUDA_VISIBLE_DEVICES": ",".join(grant.gpu_uuids),
    }
    given = {"OMP_NUM_THREADS": str(grant.cores), **order.env}
    path = [f"{package}/{BOOT}", *filter(None, [given.get("PYTHONPATH", "")])]
    return {**base, "PYTHONUNBUFFERED": "1", **given, **own, "PYTHONPATH": ":".join(path)}
