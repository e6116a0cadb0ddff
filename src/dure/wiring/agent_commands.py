"""`dure agent`: this machine as an edge node. Imported only when it is called."""

from __future__ import annotations

import getpass
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Self

import click

from dure.adapters.clock import SystemClock, SystemIds
from dure.adapters.compute.local import controllers
from dure.adapters.compute.local.backend import LocalBackend
from dure.adapters.compute.local.gpus import Declared, Machine
from dure.adapters.compute.local.watch import Durations
from dure.adapters.runtime.choose import choose
from dure.agent.agent import Agent, Times
from dure.agent.answer import HealthAnswer
from dure.agent.journal import Journal
from dure.agent.outputs import SharedRuns
from dure.agent.reading import Gauge
from dure.agent.unit import UNIT, bye_on_term, install
from dure.core.errors import DureError, ErrorCode
from dure.core.lease import Bye
from dure.core.model import NodeId
from dure.ports import Runtime
from dure.settings import Settings
from dure.wiring.build import confinement, hold_alone, yard
from dure.wiring.edge import open_queue, own_address
from dure.wiring.join_commands import invite, join
from dure.wiring.local_commands import config_option, read, refusals_in_words

log = logging.getLogger("dure.agent")


@click.group()
def agent() -> None:
    """Run this machine as an edge node: it claims jobs from the lease queue."""


agent.add_command(invite)
agent.add_command(join)


@config_option
@agent.command()
def run(config: Path | None) -> None:
    """Run the agent in the foreground, until SIGTERM (off) or SIGUSR1 (restart)."""
    settings = read(config)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    with refusals_in_words():
        serve(settings)


@config_option
@agent.command("install")
@click.option("--user", default=getpass.getuser, help="account that jobs run under")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/etc/systemd/system"),
    help="where units belong",
)
def install_command(config: Path | None, user: str, folder: Path) -> None:
    """Write the systemd units of this agent and say how to start it."""
    with refusals_in_words():
        _wanted(read(config))
    argv = [str(Path(sys.executable).with_name("dure")), "agent", "run"]
    argv += ["--config", str(config.absolute())] if config else []
    try:
        for path in install(folder, shlex.join(argv), user):
            click.echo(f"wrote {path}")
    except OSError as error:
        click.echo(f"{folder} cannot be written: {error.strerror}. Run it as root.", err=True)
        sys.exit(1)
    click.echo(f"Start it: systemctl daemon-reload && systemctl enable --now {UNIT}")


def serve(settings: Settings) -> None:
    """Everything an agent is made of, until it is stopped."""
    _wanted(settings)
    home = settings.state_dir() / "agent"
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = hold_alone(home)
    built = build(settings, home)
    with built:
        _on_signals(built.agent)
        log.info("agent of node %s, jobs under %s", built.agent.name, home / "runs")
        built.agent.run()
    os.close(lock)


def _wanted(settings: Settings) -> None:
    if not settings.edge.redis_url:
        value = "is empty: an agent needs the address of the lease queue"
        raise DureError(ErrorCode.BAD_SETTING, key="edge.redis_url", value=value)


def _cgroup_root() -> str:
    return os.environ.get("DURE_CGROUP_ROOT", "")


def _runtime(settings: Settings) -> Runtime:
    """The jail that this node's settings name, told loudly if it confines nothing."""
    choice = choose(settings.node.runtime, yard(settings))
    if not choice.runtime.confines:
        log.warning("jobs run unconfined: runtime %s", choice.runtime.name)
    return choice.runtime


class Built:
    """An agent with what it stands on; leaving the block takes it down, jobs go on."""

    def __init__(self, settings: Settings, home: Path) -> None:
        edge = settings.edge
        self._gauge = Gauge()
        clock = SystemClock()
        name = settings.node.name or socket.gethostname().split(".")[0] or "node"
        self.queue = open_queue(settings, NodeId(name))
        kill_s = settings.policy.stop_kill_s
        shared = SharedRuns(Path(edge.shared_runs), name) if edge.shared_runs else None
        self.local = LocalBackend(
            shared.own if shared else home / "runs",
            _machine(settings, name, self._gauge),
            _runtime(settings),
            clock,
            durations=Durations(leftover_kill_s=kill_s, lost_kill_s=kill_s),
            confinement=confinement(settings, controllers.find(_cgroup_root()).layout),
        )
        host = own_address(settings) if edge.agent_port else ""
        shown = f"[{host}]" if ":" in host else host
        times = Times(beat_s=edge.beat_s, early_beat_s=edge.early_beat_s, stop_kill_s=kill_s)
        self.agent = Agent(
            self.queue,
            self.local,
            Journal(home / "leases"),
            self._gauge,
            clock,
            SystemIds(),
            times=times,
            shared=shared,
            address=f"{shown}:{edge.agent_port}" if host else "",
        )
        self.answer = HealthAnswer(host, edge.agent_port, self._tell) if host else None

    def _tell(self) -> dict[str, Any]:
        return {
            "node": self.agent.name,
            "queue": "away" if self.agent.away else "ok",
            "seen_as": self.agent.state.value if self.agent.state else "new",
            "jobs": len(self.local.leases()),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.answer is not None:
            self.answer.close()
        self.local.close()
        self.queue.close()


def build(settings: Settings, home: Path) -> Built:
    """Put an agent together."""
    try:
        return Built(settings, home)
    except OSError as error:
        value = f"the health answer cannot listen there: {error.strerror}"
        raise DureError(ErrorCode.BAD_SETTING, key="edge.agent_port", value=value) from error


def _machine(settings: Settings, name: str, gauge: Gauge) -> Machine:
    node = settings.node
    slots = [Declared(tier=g.tier, count=g.count, simulated=g.simulated) for g in node.gpus]
    return Machine(
        name,
        slots,
        tiers=node.gpu_tiers,
        reserve_mib=node.reserve_mib,
        # Two readings make a GPU ready again: they should not wait for two beats.
        refresh_s=min(5.0, settings.edge.early_beat_s),
        ask=gauge,
    )


def _on_signals(running: Agent) -> None:
    """SIGTERM asks systemd what it means, in a thread: a handler must not wait."""

    def off(_number: int, _frame: FrameType | None) -> None:
        ask = threading.Thread(target=lambda: running.stop(bye_on_term()), daemon=True)
        ask.start()

    signal.signal(signal.SIGTERM, off)
    signal.signal(signal.SIGINT, lambda *_: running.stop(Bye.OFF))
    signal.signal(signal.SIGUSR1, lambda *_: running.stop(Bye.RESTART))
