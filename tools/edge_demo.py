"""`make edge-demo`: two PCs that come and go, one Redis, real training; ends by itself.

A server, a private Redis and the agents of two nodes run on this machine, each a process of
its own. One agent is killed while its job trains, the other PC is "switched off": what is
shown is what the server's REST API says. Times are a fifteenth of the product's.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dure.client import Client, Job
from dure.core.model import TERMINAL

sys.path.insert(0, str(Path(__file__).parent))
import demo
import up
from demo import check, tell

STATE = up.ROOT / "var" / "edge-demo"
TIMES = """
beat_s = 1.0
early_beat_s = 0.4
overdue_s = 0.5
burst_s = [0.0, 0.3, 0.6, 1.0]
closed_grace_s = 0.3
lease_ttl_s = 6.0
ack_s = 4.0
tick_s = 0.2
"""
POLICY = "\n[policy]\nstop_kill_s = 5.0\n"
TIER = '\n[[tiers]]\nname = "SIM-L"\nvram_gb = 1.0\ntflops = 2.0\n'
SLOT = '[[node.gpus]]\ntier = "SIM-L"\ncount = 1\nsimulated = true\n'


def free_port() -> int:
    """A port nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Pc:
    """One node: its settings and its agent."""

    def __init__(self, name: str, edge: str) -> None:
        self.name = name
        self.folder = STATE / name
        self.folder.mkdir()
        self.config = self.folder / "dure.toml"
        agent = f'agent_host = "127.0.0.1"\nagent_port = {free_port()}\n'
        head = f'[server]\nstate_dir = "{self.folder}"\n[node]\nname = "{name}"\n'
        self.config.write_text(f"{head}{SLOT}{edge}{agent}{POLICY}")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Switch it on."""
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                [up.DURE, "agent", "run", "--config", self.config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=up.ROOT,
            )

    def end(self, number: int) -> None:
        """Signal the agent and wait for its end."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(20)


class Watch:
    """Prints each node and job whose state has changed, with the seconds since the start."""

    def __init__(self, client: Client, jobs: dict[str, Job]) -> None:
        self.client = client
        self.jobs = jobs
        self.seen: dict[str, str] = {}
        self.begun = time.monotonic()

    def look(self) -> None:
        """Once."""
        now = {node.name: str(node.health) for node in self.client.nodes()}
        for name, job in self.jobs.items():
            out = self.client.job_out(job.id)
            where = f" on {out.placement.node}" if out.placement else ""
            now[name] = f"{out.state}{where}" if out.state == "RUNNING" else out.state
        for name, words in now.items():
            if self.seen.get(name) != words:
                print(f"  {time.monotonic() - self.begun:5.1f}s  {name:<8} {words}", flush=True)
        self.seen = now

    def until(self, done: Callable[[], bool], what: str, limit_s: float = 60) -> None:
        """Look until it is so."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            self.look()
            if done():
                return
            time.sleep(0.1)
        sys.exit(f"edge-demo: it did not happen in {limit_s:.0f} s: {what}; see {STATE}")

    def trained(self, name: str, words: bytes) -> bool:
        """Whether the job has said so in its log."""
        return words in self.client.read_log(self.jobs[name].id).data


def train(client: Client, name: str, node: str | None, epochs: int) -> Job:
    """Submit the shipped training program."""
    program = str(up.ROOT / "examples" / "digits.py")
    command = [sys.executable, program, f"--epochs={epochs}", "--pause-s=0.1"]
    return client.submit(command, name=name, node=node)


def run(url: str, pcs: dict[str, Pc]) -> None:
    """The whole story."""
    client = Client(url=url, token=(STATE / "admin-token").read_text().strip(), language=demo.LANG)
    watch = Watch(client, {})
    tell("\nTwo PCs are switched on:", "\nPC 두 대를 켭니다:")
    for pc in pcs.values():
        pc.start()
    watch.until(
        lambda: [watch.seen.get(name) for name in pcs] == ["STABLE"] * 2, "both nodes STABLE"
    )
    tell("\nTwo jobs train, one on each:", "\n작업 두 개가 각각 학습합니다:")
    watch.jobs["train-a"] = train(client, "train-a", "pc-a", 110)
    watch.jobs["train-b"] = train(client, "train-b", None, 130)
    watch.until(lambda: watch.trained("train-b", b"epoch 20/"), "both train")
    tell(
        "\nkill -9 to the agent of pc-a; its job has a supervisor of its own:",
        "\npc-a의 에이전트를 kill -9 합니다. 작업은 자기 감독 프로세스가 지킵니다:",
    )
    pcs["pc-a"].end(signal.SIGKILL)
    watch.until(lambda: watch.seen["pc-a"] == "OFFLINE", "pc-a OFFLINE")
    pcs["pc-a"].start()
    watch.until(lambda: watch.seen["pc-a"] == "STABLE", "pc-a back")
    tell(
        "\npc-b is switched off; its work waits, and goes on elsewhere from its checkpoint:",
        "\npc-b를 끕니다. 작업은 기다렸다가 다른 곳에서 체크포인트부터 이어 갑니다:",
    )
    pcs["pc-b"].end(signal.SIGTERM)
    ended = lambda: all(watch.seen[name] in TERMINAL for name in watch.jobs)  # noqa: E731 - short
    watch.until(ended, "both jobs end", limit_s=90)
    prove(client, watch)


def prove(client: Client, watch: Watch) -> None:
    """What was shown must have happened."""
    print()
    for name, job in watch.jobs.items():
        out, tries = client.job_out(job.id), client.attempts(job.id)
        places = " → ".join(a.placement.node for a in tries)
        print(f"  {name}  {out.state}  attempts {len(tries)} ({places})  retries {out.retries}")
        check(out.state == "COMPLETED", f"{name} is {out.state}")
        check(out.retries == 0, f"{name} was counted as a failure")
    one, two = (client.attempts(job.id) for job in watch.jobs.values())
    check(len(one) == 1, "train-a was started again though its process lived")
    check([a.placement.node for a in two] == ["pc-b", "pc-a"], "train-b did not move")
    first = client.read_log(watch.jobs["train-b"].id).data.split(b"\n")[0].decode()
    print(f"  train-b says: {first}")
    check("from epoch 0" not in first, "train-b did not go on from its checkpoint")


def main() -> int:
    """Set up, run, clean up."""
    program = shutil.which("redis-server")
    if program is None:
        print("make edge-demo needs Redis. As root: apt-get install redis-server", file=sys.stderr)
        return 1
    shutil.rmtree(STATE, ignore_errors=True)
    (STATE / "redis").mkdir(parents=True)
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(STATE / "redis")]
    redis = subprocess.Popen(
        [program, *options, "--appendonly", "yes", "--save", ""], stdout=subprocess.DEVNULL
    )
    url = f"redis://127.0.0.1:{port}/0"
    edge = f'\n[edge]\nredis_url = "{url}"\nshared_runs = "{STATE / "runs"}"\n{TIMES}'
    head = f'[server]\nstate_dir = "{STATE}"\n[node]\nenabled = false\n'
    (STATE / "dure.toml").write_text(f"{head}{edge}{POLICY}{TIER}")
    pcs = {name: Pc(name, edge) for name in ("pc-a", "pc-b")}
    server = up.spawn(STATE, "--port", "0")
    try:
        address = up.wait_url(STATE, server)
        tell(
            f"Server at {address}, Redis at port {port}, two PCs with one SIMULATED slot each.",
            f"서버 {address}, Redis 포트 {port}, 모의 슬롯이 하나씩 있는 PC 두 대.",
        )
        run(address, pcs)
    finally:
        for pc in pcs.values():
            if pc.process is not None:
                pc.end(signal.SIGTERM)
        server.send_signal(signal.SIGTERM)
        server.wait(20)
        redis.terminate()
        redis.wait(10)
    check(server.returncode == 0, f"the server ended with {server.returncode}")
    tell("\nDone; no process is left.", "\n끝났습니다. 남은 프로세스가 없습니다.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
