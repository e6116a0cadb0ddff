"""Compute backends under one contract: the same behaviours, pretended and real."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from dure.adapters.clock import SystemClock, SystemIds
from dure.adapters.compute.edge.backend import EdgeBackend
from dure.adapters.compute.local.backend import LocalBackend
from dure.adapters.compute.local.gpus import Declared, Machine, Probe
from dure.adapters.compute.local.processes import processes
from dure.adapters.compute.local.watch import Durations
from dure.adapters.compute.simulated import SimRun, SimulatedBackend
from dure.adapters.lease.memory import MemoryLeaseQueue
from dure.adapters.lease.redis import RedisLeaseQueue
from dure.adapters.runtime.process import ProcessRuntime
from dure.agent.agent import Agent, Times
from dure.agent.journal import Journal
from dure.agent.reading import Gauge
from dure.core.lease import Bye
from dure.core.model import Evidence, Gpu, Node, PlacementId
from dure.ports import Exited, Freed, LaunchOrder, LeaseKey, LeaseQueue, Observation
from tests.lease.servers import RedisServer

FOREVER = 10**9
LOOP = "touch ready; while :; do sleep 0.05; done"


class Behaviour(NamedTuple):
    """How a job behaves: for the fake, and as a real command."""

    run: SimRun
    script: str
    workdir: str = ""


BEHAVIOURS = {
    "succeeds": Behaviour(SimRun(run_ms=10), "exit 0"),
    "fails": Behaviour(SimRun(run_ms=10, evidence=Evidence(exit_code=3)), "exit 3"),
    "crashes": Behaviour(SimRun(run_ms=10, evidence=Evidence(signal=11)), "kill -SEGV $$"),
    "runs": Behaviour(SimRun(run_ms=FOREVER), LOOP),
    "saves": Behaviour(
        SimRun(run_ms=FOREVER, save_ms=100), f"trap 'sleep 0.1; exit 0' TERM; {LOOP}"
    ),
    "stubborn": Behaviour(SimRun(run_ms=FOREVER, save_ms=FOREVER), f"trap '' TERM; {LOOP}"),
    "lingers": Behaviour(
        SimRun(run_ms=10, linger_ms=400),
        "setsid bash -c 'trap \"\" TERM; touch ready; sleep 0.4' & "
        "while [ ! -e ready ]; do sleep 0.01; done; exit 0",
    ),
    "refused": Behaviour(SimRun(refuse="no such folder"), "exit 0", workdir="/no/such/folder"),
}


def order(what: str, job: int, epoch: int = 1, **fields: object) -> LaunchOrder:
    behaviour = BEHAVIOURS.get(what, Behaviour(SimRun(), what))
    values = {
        "key": LeaseKey(job=job, epoch=epoch),
        "placement": PlacementId(node="here", tier="RTX4090"),
        "gpus": (0,),
        "user": "kim",
        "lab": "BCG",
        "name": what[:20],
        "command": ("bash", "-c", behaviour.script),
        "env": {"BEHAVIOUR": what},
        "workdir": behaviour.workdir,
        "start_no": epoch,
        "simulated": True,
        **fields,
    }
    return LaunchOrder(**values)


class Rig:
    """A backend with what a test needs around it; `cursor` is what was acknowledged."""

    def __init__(self) -> None:
        self.cursor = 0
        self.seen: list[Observation] = []

    def wait(self, what: Callable[[], object]) -> None:
        raise NotImplementedError

    def look(self) -> list[Observation]:
        """Everything of leases since the last acknowledgement, beats left out."""
        found, self.next = self.backend.observe(self.cursor)
        self.seen = [o for o in found if type(o).__name__ != "Beat" and hasattr(o, "key")]
        return self.seen

    def acknowledge(self) -> None:
        self.look()
        self.cursor = self.next

    def of(self, job: int, epoch: int = 1) -> list[Observation]:
        return [o for o in self.look() if o.key == LeaseKey(job=job, epoch=epoch)]

    def names(self, job: int, epoch: int = 1) -> list[str]:
        return [type(o).__name__ for o in self.of(job, epoch)]

    def until(self, job: int, kind: str, epoch: int = 1) -> list[str]:
        self.wait(lambda: kind in self.names(job, epoch))
        return self.names(job, epoch)

    def exited(self, job: int, epoch: int = 1) -> Exited:
        self.until(job, "Exited", epoch)
        return next(o for o in self.of(job, epoch) if isinstance(o, Exited))

    def refused_order(self, job: int) -> LaunchOrder:
        """An order that this kind of backend refuses at once."""
        return order("refused", job)

    def freed(self, job: int, epoch: int = 1) -> Freed:
        self.until(job, "Freed", epoch)
        return next(o for o in self.of(job, epoch) if isinstance(o, Freed))


class ManualClock:
    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.ms


class SimRig(Rig):
    name = "simulated"

    def __init__(self, tmp_path: Path) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.journal = tmp_path / "journal"
        self.launched: list[LeaseKey] = []
        self.open()

    def open(self) -> None:
        node = Node(
            name="here",
            backend="simulated",
            gpus=tuple(Gpu(index=i, tier="RTX4090", simulated=True) for i in range(4)),
        )
        self.backend = SimulatedBackend(self.clock, [node], self.script, journal=self.journal)
        self.cursor = 0

    def script(self, wanted: LaunchOrder) -> SimRun:
        return BEHAVIOURS[wanted.env["BEHAVIOUR"]].run

    def ready(self, job: int, epoch: int = 1) -> None:
        self.until(job, "Started", epoch)

    def starts(self, job: int) -> int:
        return sum(o.key.job == job for o in self.backend.launches)

    def wait(self, what: Callable[[], object]) -> None:
        for _ in range(10_000):
            if what():
                return
            self.clock.ms += 10
        raise AssertionError("it did not happen")

    def sleep(self, seconds: float) -> None:
        self.clock.ms += round(seconds * 1000)

    def restart(self) -> None:
        self.backend.close()
        self.open()

    def close(self) -> None:
        self.backend.close()


class WallClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class LocalRig(Rig):
    name = "local"
    durations = Durations(
        start_s=5, leftover_kill_s=2, lost_kill_s=0.4, beat_s=0.1, poll_s=0.02, node_s=0.2
    )

    def __init__(self, tmp_path: Path) -> None:
        super().__init__()
        self.root = tmp_path / "runs"
        self.clock = WallClock()
        self.hints = 0
        self.open()

    def open(self) -> None:
        declared = [Declared(tier="RTX4090", count=4, simulated=True)]
        self.machine = Machine("here", declared, ask=lambda: Probe(problem="no driver"))
        runtime = ProcessRuntime({"PATH": os.environ["PATH"], "DURE_TOKEN": "secret"})
        self.backend = LocalBackend(
            self.root, self.machine, runtime, self.clock, durations=self.durations
        )
        self.backend.watch(self.hint)
        self.cursor = 0

    def hint(self) -> None:
        self.hints += 1

    def out(self, job: int, epoch: int = 1) -> Path:
        return self.root / str(job) / str(epoch) / "out"

    def ready(self, job: int, epoch: int = 1) -> None:
        self.until(job, "Started", epoch)
        self.wait((self.out(job, epoch) / "ready").exists)

    def starts(self, job: int) -> int:
        return len(list((self.root / str(job)).glob("*/status.json")))

    def wait(self, what: Callable[[], object]) -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if what():
                return
            time.sleep(0.005)
        raise AssertionError(f"it did not happen; seen: {self.seen}")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def restart(self) -> None:
        self.backend.close()
        self.open()

    def supervisor(self, job: int, epoch: int = 1) -> int:
        """Process id of the supervisor that holds the lock of a run."""
        return next(pid for pid in self._supervisors() if self._runs(pid, job, epoch))

    def _runs(self, pid: int, job: int, epoch: int) -> bool:
        folder = str(self.root / str(job) / str(epoch)).encode()
        return folder in _read(f"/proc/{pid}/cmdline").split(b"\0")

    def _supervisors(self) -> list[int]:
        mine = str(self.root).encode() + b"/"
        return [pid for pid in processes() if mine in _read(f"/proc/{pid}/cmdline")]

    def left(self) -> set[int]:
        """Processes of jobs and supervisors that still live."""
        mark = f"JOB_OUTPUT_DIR={self.root}/".encode()
        jobs = {pid for pid in processes() if mark in _read(f"/proc/{pid}/environ")}
        return jobs | set(self._supervisors())

    def close(self) -> None:
        self.backend.close()
        end = time.monotonic() + 5
        while self.left() and time.monotonic() < end:
            for pid in self.left():
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue
            time.sleep(0.01)
        self.backend._spawner.reap()
        assert not self.left()


class EdgeRig(Rig):
    """A queue, a real agent on this machine in a thread, and the control plane's backend."""

    name = "edge"
    times = Times(beat_s=0.2, early_beat_s=0.2, door_s=2, retry_s=0.05, stop_kill_s=0.4)

    def __init__(self, tmp_path: Path) -> None:
        super().__init__()
        self.node = LocalRig(tmp_path)
        self.clock = self.node.clock
        self.tmp_path = tmp_path
        self.queue = self.make_queue()
        self.start_agent()
        self.wait(lambda: self.queue.nodes().nodes)
        self.open()

    def make_queue(self) -> LeaseQueue:
        return MemoryLeaseQueue(SystemClock())

    def start_agent(self) -> None:
        journal = Journal(self.tmp_path / "leases")
        self.agent = Agent(
            self.queue,
            self.node.backend,
            journal,
            Gauge(lambda: Probe(problem="no driver")),
            SystemClock(),
            SystemIds(),
            times=self.times,
        )
        self.thread = threading.Thread(target=self.agent.run, daemon=True)
        self.thread.start()

    def open(self) -> None:
        self.backend = EdgeBackend(self.queue, self.clock, logs=self.tmp_path / "logs", poll_s=0.1)
        self.cursor = 0

    def ready(self, job: int, epoch: int = 1) -> None:
        self.until(job, "Started", epoch)
        self.wait((self.node.out(job, epoch) / "ready").exists)

    def starts(self, job: int) -> int:
        return self.node.starts(job)

    def refused_order(self, job: int) -> LaunchOrder:
        return order("succeeds", job, placement=PlacementId(node="nowhere", tier="RTX4090"))

    wait = LocalRig.wait
    sleep = LocalRig.sleep

    def restart(self) -> None:
        self.backend.close()
        self.open()

    def close(self) -> None:
        self.agent.stop(Bye.RESTART)
        self.thread.join(5)
        self.backend.close()
        self.queue.close()
        self.node.close()


class RedisEdgeRig(EdgeRig):
    def make_queue(self) -> LeaseQueue:
        (self.tmp_path / "redis").mkdir()
        self.server = RedisServer(self.tmp_path / "redis")
        return RedisLeaseQueue(self.server.url)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.server.close()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


RIGS = {
    "simulated": SimRig,
    "local": LocalRig,
    "edge": EdgeRig,
    "edge over Redis": RedisEdgeRig,
}


def replace(value: LaunchOrder, **fields: object) -> LaunchOrder:
    return msgspec.structs.replace(value, **fields)
