"""A job as a plain process of the server's own user: for a machine with one user only."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dure.ports import Grant, LaunchOrder, RuntimeCommand

INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""All that a job sees of the server's environment: tokens and passwords stay behind."""
DEFAULTS = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8"}


class ProcessRuntime:
    """No confinement; `environ` (default: the server's) is what `INHERITED` is taken from."""

    name = "process"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        inherited = {k: v for k, v in environ.items() if k in INHERITED and v}
        self._base = {**DEFAULTS, **inherited, "PYTHONUNBUFFERED": "1"}

    def command(self, order: LaunchOrder, grant: Grant) -> RuntimeCommand:
        """The user's command; the user's variables never override the job's own."""
        own = {
            "JOB_ID": str(order.key.job),
            "JOB_ATTEMPT": str(order.start_no),
            "JOB_OUTPUT_DIR": grant.output_dir,
            "DURE_JOB_EPOCH": str(order.key.epoch),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            # Empty hides every GPU: a simulated slot must not touch a real one.
            "CUDA_VISIBLE_DEVICES": ",".join(grant.gpu_uuids),
        }
        threads = {"OMP_NUM_THREADS": str(grant.cores)}
        env = {**self._base, **threads, **order.env, **own}
        return RuntimeCommand(argv=order.command, env=env)
