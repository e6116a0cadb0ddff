"""A control plane in this process, a real Redis, and real agents, each in a network of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from dure.adapters.clock import SystemClock
from dure.adapters.compute.local.processes import processes
from dure.adapters.store.memory import MemoryStore
from dure.core.model import Job, JobRequest, Lab, NodeHealth, Role, Tier, User
from dure.core.policy import Policy
from dure.engine import admin, commands
from dure.engine.controller import Controller
from dure.engine.engine import Engine
from dure.settings import Settings, load
from dure.wiring.edge import Edge
from tests.lease.servers import RedisServer

DURE = str(Path(sys.executable).with_name("dure"))
TIER = Tier(name="RTX4090", vram_gb=24, mtflops=82_600)
# A thirtieth of the product's times, and a bit of air for a busy machine.
EDGE = """
beat_s = 0.5
early_beat_s = 0.25
overdue_s = 0.4
burst_s = [0.0, 0.2, 0.5, 1.0]
closed_grace_s = 0.3
suspected_probe_s = 0.5
probe_timeout_s = 0.4
lease_ttl_s = 3.0
ack_s = 2.0
sample_stale_s = 3.0
tick_s = 0.1
agent_port = 8471
penalty_fall = 0
"""
SILENT_S = 0.5 + 0.4 + 1.0 + 0.4
"""Beat, overdue, last probe, its time limit: the protocol's bound on these times."""
TTL_S = 3.0


def sh(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)


def why_no_namespaces() -> str:
    """Empty if this machine lets us make network namespaces."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"dure-try-{os.getpid()}"
    try:
        sh("ip", "netns", "add", name)
        sh("ip", "netns", "del", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', error)}".strip()
    return ""


class Network:
    """One namespace, joined to this machine by a cable that can be pulled."""

    def __init__(self, number: int) -> None:
        self.space = f"dure{os.getpid()}-{number}"
        self.ours = f"dv{os.getpid() % 100_000}-{number}"
        self.net = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 250}"
        low = 4 * number
        self.host, self.inside = f"{self.net}.{low + 1}", f"{self.net}.{low + 2}"
        sh("ip", "netns", "add", self.space)
        sh(
            "ip",
            "link",
            "add",
            self.ours,
            "type",
            "veth",
            "peer",
            "name",
            "v0",
            "netns",
            self.space,
        )
        sh("ip", "addr", "add", f"{self.host}/30", "dev", self.ours)
        sh("ip", "link", "set", self.ours, "up")
        sh("ip", "-n", self.space, "addr", "add", f"{self.inside}/30", "dev", "v0")
        for device in ("lo", "v0"):
            sh("ip", "-n", self.space, "link", "set", device, "up")

    def pull(self) -> None:
        """Every packet is dropped from now on; nobody is told."""
        sh("ip", "link", "set", self.ours, "down")

    def plug(self) -> None:
        sh("ip", "link", "set", self.ours, "up")

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.ours], check=False, capture_output=True)


class AgentProcess:
    """`dure agent run` in a namespace."""

    def __init__(self, name: str, folder: Path, network: Network, redis_port: int, slots: int):
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.network = network
        self.config = self.folder / "dure.toml"
        self.config.write_text(
            f'[server]\nstate_dir = "{self.folder / "state"}"\n'
            f'[node]\nname = "{name}"\n'
            f'[[node.gpus]]\ntier = "RTX4090"\ncount = {slots}\nsimulated = true\n'
            f'[edge]\nredis_url = "redis://{network.host}:{redis_port}/0"\n{EDGE}'
            f"[policy]\nstop_kill_s = 1.0\n"
        )
        self.log = self.folder / "agent.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def runs(self) -> Path:
        return self.folder / "state" / "agent" / "runs"

    def start(self) -> None:
        argv = ["ip", "netns", "exec", self.network.space, DURE, "agent", "run"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*argv, "--config", str(self.config)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 10) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def jobs(self) -> list[int]:
        """Processes of jobs and supervisors that live on this node."""
        runs = str(self.runs).encode()
        return [
            p for p in processes() if runs in _read(p, "environ") or runs in _read(p, "cmdline")
        ]

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.kill()
        end = time.monotonic() + 5
        while (left := self.jobs()) and time.monotonic() < end:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


class Site:
    """Engine and watchdog here; `agent(...)` adds a machine."""

    def __init__(self, folder: Path) -> None:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
        self.folder = folder
        (folder / "redis").mkdir()
        self.redis = RedisServer(folder / "redis", "--protected-mode", "no", host="0.0.0.0")
        self.agents: dict[str, AgentProcess] = {}
        self.store = MemoryStore()
        with self.store.write() as tx:
            tx.put_tier(TIER)
            tx.put_lab(Lab(name="BCG"))
            tx.put_user(User(name="kim", lab="BCG"))
        self.user = User(name="kim", lab="BCG", role=Role.ADMIN)
        self.settings = self._settings()
        self.policy = Policy(
            stop_kill_s=1.0, cancel_kill_s=2.0, backoff_s=(0.5,), launch_skip_s=0.5
        )
        self.start()

    def _settings(self) -> Settings:
        path = self.folder / "server.toml"
        path.write_text(f'[edge]\nredis_url = "{self.redis.url}"\n{EDGE}')
        return load(path, {})

    def start(self) -> None:
        clock = SystemClock()
        self.edge = Edge(self.settings, self.folder, clock, self._joined)
        self.engine = Engine(self.store, clock, self.policy, {"edge": self.edge.backend})
        self.edge.show(self.engine)
        for node in self.edge.backend.inventory().nodes:
            self._joined(node)
        self.controller = Controller(self.engine, sweep_s=0.5)
        self.controller.start()

    def _joined(self, node) -> None:
        if hasattr(self, "engine"):
            admin.put_node(self.engine, "server", node)

    def stop(self) -> None:
        self.controller.stop()
        self.edge.close()
        self.edge.backend.close()

    def agent(self, name: str, slots: int = 1) -> AgentProcess:
        network = Network(len(self.agents))
        made = AgentProcess(name, self.folder, network, self.redis.port, slots)
        self.agents[name] = made
        self.until(lambda: self.takes_work(name), f"{name} takes work")
        return made

    # -- asking --

    def node(self, name: str):
        with self.engine.world.lock:
            return self.engine.world.pool.nodes.get(name)

    def health(self, name: str) -> NodeHealth | None:
        node = self.node(name)
        return node.health if node else None

    def takes_work(self, name: str) -> bool:
        node = self.node(name)
        return node is not None and node.health is NodeHealth.STABLE and node.ready

    def submit(self, script: str, **fields: object) -> int:
        request = JobRequest(name="job", lab="BCG", command=("bash", "-c", script), **fields)
        return commands.submit(self.engine, self.user, [request]).jobs[0].id

    def job(self, job: int) -> Job:
        with self.store.read() as tx:
            found = tx.job(job)
            assert found is not None
            return found

    def state(self, job: int) -> str:
        return self.job(job).state.value

    def attempts(self, job: int) -> list:
        with self.store.read() as tx:
            return tx.attempts(job)

    def until(self, what: Callable[[], object], name: str, limit_s: float = 12.0) -> float:
        """Seconds until it was so."""
        begun = time.monotonic()
        while time.monotonic() < begun + limit_s:
            if what():
                return time.monotonic() - begun
            time.sleep(0.01)
        raise AssertionError(f"not within {limit_s} s: {name}\n{self.describe()}")

    def until_state(self, job: int, *states: str, limit_s: float = 12.0) -> float:
        return self.until(lambda: self.state(job) in states, f"job {job} {states}", limit_s)

    def describe(self) -> str:
        with self.store.read() as tx:
            lines = [
                f"job {j.id} {j.state} epoch {j.epoch} retries {j.retries}" for j in tx.all_jobs()
            ]
        with self.engine.world.lock:
            lines += [str(node) for node in self.engine.world.pool.nodes.values()]
        for agent in self.agents.values():
            lines.append(f"{agent.name}: {agent.log.read_text()[-1500:]}")
        return "\n".join(lines)

    def hash(self, key: str) -> dict[str, str]:
        raw = self.redis.client(decode_responses=True)
        return raw.hgetall(key)

    def close(self) -> None:
        self.stop()
        for agent in self.agents.values():
            agent.close()
            agent.network.close()
        self.redis.close()
