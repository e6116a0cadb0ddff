"""The Slurm backend on a real Slurm, as the contract suite needs it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tools.slurm_testbed import PREEMPTIBLE, Testbed

from dure.adapters.compute.slurm.backend import SlurmBackend
from dure.adapters.compute.slurm.commands import Commands
from dure.adapters.compute.slurm.leases import Durations
from dure.adapters.compute.slurm.nodes import Mapped
from dure.adapters.compute.slurm.submit import Options
from dure.adapters.runtime.process import ProcessRuntime
from tests.contract.backends import Rig, WallClock

DURATIONS = Durations(
    query_s=0.5,
    poll_s=0.02,
    settle_s=1.5,
    start_s=5,
    pending_s=60,
    lost_kill_s=1,
    stop_margin_s=2,
    beat_s=0.5,
    pause_s=0.2,
    pause_max_s=0.5,
)


class SlurmRig(Rig):
    """Jobs run as the account `nobody`, in folders that it can reach."""

    name = "slurm"

    def __init__(self, bed: Testbed, **changes: object) -> None:
        super().__init__()
        self.bed = bed
        self.home = Path(tempfile.mkdtemp(prefix="dure-slurm-rig-")).resolve()
        self.home.chmod(0o755)
        self.root = self.home / "runs"
        self.clock = WallClock()
        self.hints = 0
        self.changes = changes
        self.durations = DURATIONS
        self.open()

    def open(self) -> None:
        values = {
            "mapped": Mapped(
                tiers={"rtx4090": "RTX4090"}, preemptible=(PREEMPTIBLE,), simulated=True
            ),
            "options": Options(),
            "accounts": {"kim": "nobody"},
            "durations": self.durations,
            **self.changes,
        }
        self.backend = SlurmBackend(
            self.root,
            self.home / "state",
            Commands(bin_dir="", conf=str(self.bed.conf), timeout_s=3),
            ProcessRuntime({"PATH": "/usr/bin:/bin", "DURE_TOKEN": "secret"}),
            self.clock,
            **values,
        )
        self.backend.watch(self.hint)
        self.cursor = 0

    def hint(self) -> None:
        self.hints += 1

    def run_dir(self, job: int, epoch: int = 1) -> Path:
        return self.root / str(job) / str(epoch) / "run"

    def out(self, job: int, epoch: int = 1) -> Path:
        return self.run_dir(job, epoch) / "out"

    def log(self, job: int, epoch: int = 1) -> str:
        return (self.run_dir(job, epoch) / "log").read_text()

    def ready(self, job: int, epoch: int = 1) -> None:
        self.until(job, "Started", epoch)
        self.wait((self.out(job, epoch) / "ready").exists)

    def starts(self, job: int) -> int:
        return len(list((self.root / str(job)).glob("*/run/status.json")))

    def slurm_id(self, job: int, epoch: int = 1) -> int:
        """The Slurm job of an attempt, as Slurm itself tells."""
        found = [n for n, comment in self.slurm_jobs() if comment.endswith(f"/{job}.{epoch}")]
        assert len(found) == 1, found
        return found[0]

    def slurm_jobs(self) -> list[tuple[int, str]]:
        lines = self.bed.run("squeue", "-h", "-t", "all", "-o", "%A|%k").splitlines()
        pairs = (line.split("|", 1) for line in lines)
        mine = f"dure/{self.backend._site.id}/"
        return [(int(number), comment) for number, comment in pairs if comment.startswith(mine)]

    def wait(self, what: Callable[[], object], timeout_s: float = 18) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if what():
                return
            time.sleep(0.01)
        raise AssertionError(f"it did not happen; seen: {self.seen}")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def restart(self) -> None:
        self.backend.close()
        self.open()

    def processes(self) -> list[str]:
        """Processes of jobs that live."""
        mark = f"JOB_OUTPUT_DIR={self.root}/".encode()
        return [pid for pid in _pids() if mark in _read(f"/proc/{pid}/environ")]

    def close(self) -> None:
        self.backend.close()
        numbers = [str(number) for number, _ in self.slurm_jobs()]
        if numbers:
            self.bed.run("scancel", "--signal=KILL", "--full", *numbers, check=False)
            self.bed.run("scancel", *numbers, check=False)
        self.wait(lambda: not self.processes())
        shutil.rmtree(self.home, ignore_errors=True)


def _pids() -> list[str]:
    return [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
