"""A real `dure server` in a process of its own, which tests may kill and start again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dure.client import Client
from dure.wire import LabIn, TokenIn, UserIn

DURE = Path(sys.executable).parent / "dure"
CONFIG = """
[server]
state_dir = "{state}"
port = 0

[policy]
slots_per_user = 100
cancel_kill_s = {cancel_kill_s}
stop_kill_s = {stop_kill_s}
checkpoint_s = 1.0

[limits]
read_per_s = 1000.0
read_burst = 1000
submit_per_min = 100000.0
streams = 50

[node]
name = "box"
runtime = "{runtime}"

[[tiers]]
name = "BIG"
vram_gb = 1.0
tflops = 2.0
sort_order = 2

[[tiers]]
name = "SMALL"
vram_gb = 0.5
tflops = 1.0
sort_order = 1

[[node.gpus]]
tier = "BIG"
count = 2
simulated = true

[[node.gpus]]
tier = "SMALL"
count = 2
simulated = true
"""


def until(condition: Callable[[], object], what: str, timeout_s: float = 20) -> object:
    """The first true answer; a test that waits longer has found a fault."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.03)
    raise AssertionError(f"did not happen in {timeout_s} s: {what}")


class Site:
    """One installation on a folder."""

    def __init__(
        self,
        folder: Path,
        cancel_kill_s: float = 3.0,
        stop_kill_s: float = 1.5,
        runtime: str = "auto",
    ) -> None:
        self.state = folder / "state"
        self.state.mkdir()
        self.config = folder / "dure.toml"
        text = CONFIG.format(
            state=self.state,
            cancel_kill_s=cancel_kill_s,
            stop_kill_s=stop_kill_s,
            runtime=runtime,
        )
        self.config.write_text(text)
        self.server: subprocess.Popen[bytes] | None = None
        self.clients: list[Client] = []

    def start(self) -> str:
        (self.state / "server.url").unlink(missing_ok=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith("DURE_")}
        with (self.state / "server.log").open("ab") as log:
            self.server = subprocess.Popen(
                [DURE, "server", "--config", self.config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        until(
            lambda: (self.state / "server.url").exists() or self.server.poll() is not None, "start"
        )
        assert self.server.poll() is None, self.log()
        return self.url

    @property
    def url(self) -> str:
        return (self.state / "server.url").read_text().strip()

    def log(self) -> str:
        return (self.state / "server.log").read_text()

    def kill(self) -> None:
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()

    def stop(self) -> int:
        self.server.send_signal(signal.SIGTERM)
        code = self.server.wait(15)
        self.server = None
        return code

    def admin(self) -> Client:
        return self.client((self.state / "admin-token").read_text().strip())

    def client(self, token: str) -> Client:
        made = Client(url=self.url, token=token)
        self.clients.append(made)
        return made

    def member(self, name: str, lab: str) -> Client:
        admin = self.admin()
        if lab not in {x.name for x in admin.labs()}:
            admin.put_lab(lab, LabIn())
        admin.put_user(name, UserIn(lab=lab))
        return self.client(admin.new_token(TokenIn(user=name)).secret)

    def audit(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [DURE, "audit", "--config", self.config], capture_output=True, text=True, check=False
        )

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.server is not None and self.server.poll() is None:
            self.stop()
        kill_leftovers(self.state)


def kill_leftovers(state: Path) -> None:
    """Whatever a failed test left: the machine is shared with the next one."""
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
        except OSError:
            continue
        if str(state).encode() in words and int(proc.name) != os.getpid():
            try:
                os.kill(int(proc.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
