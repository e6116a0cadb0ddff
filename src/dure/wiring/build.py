"""Concrete classes chosen by the settings, put together."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import structlog

from dure.adapters.clock import SystemClock, SystemIds
from dure.adapters.compute.local import controllers
from dure.adapters.compute.local.backend import LocalBackend
from dure.adapters.compute.local.confinement import Confinement
from dure.adapters.compute.local.gpus import Declared, Machine
from dure.adapters.compute.local.rundir import Layout
from dure.adapters.compute.local.watch import Durations
from dure.adapters.runtime import host
from dure.adapters.runtime.choose import choose
from dure.adapters.runtime.jail import Yard
from dure.adapters.store.sql import SqlStore
from dure.core.errors import DureError, ErrorCode
from dure.core.model import Node, Tier, UserId
from dure.engine import admin
from dure.engine.controller import Controller
from dure.engine.engine import Engine
from dure.engine.forecast import Lookout
from dure.ports import ComputeBackend, Runtime, Store
from dure.settings import Settings
from dure.wiring.edge import Edge
from dure.wiring.slurm import slurm_backend
from dure.wiring.tiers import declared, missing_tiers

log = structlog.get_logger("dure.server")


class Installation:
    """One server's parts, built but not yet running."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state_dir = settings.state_dir()
        self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = hold_alone(self.state_dir)
        self.store: Store = SqlStore(settings.database_url())
        with self.store.read() as tx:
            newest = tx.events(after=max(0, tx.last_event_id() - 1), limit=1)
        # Time goes on from the last thing that was written, even after a clock set back.
        self.clock = SystemClock(not_before_ms=newest[-1].at_ms if newest else 0)
        self.backends: dict[str, ComputeBackend] = {}
        self.runtime: Runtime | None = None
        if settings.node.enabled:
            self.backends["local"] = self._local()
        self._registered = False
        self._edge: Edge | None = None
        if settings.edge.redis_url:
            self._edge = Edge(settings, self.state_dir, self.clock, self._edge_node)
            self.backends["edge"] = self._edge.backend
        if settings.slurm.enabled:
            self.backends["slurm"] = slurm_backend(settings, self.state_dir, self.clock)
        self.engine = Engine(self.store, self.clock, settings.policy, self.backends)
        if self._edge is not None:
            self._edge.show(self.engine)
        engine = settings.engine
        self.controller = Controller(self.engine, engine.sweep_s, engine.idempotency_s)
        self.lookout = Lookout(self.engine)

    def _local(self) -> LocalBackend:
        node = self.settings.node
        slots = [Declared(tier=g.tier, count=g.count, simulated=g.simulated) for g in node.gpus]
        machine = Machine(
            node.name or socket.gethostname().split(".")[0] or "local",
            slots,
            tiers=node.gpu_tiers,
            reserve_mib=node.reserve_mib,
        )
        kill_s = self.settings.policy.stop_kill_s
        choice = choose(node.runtime, yard(self.settings))
        if not choice.runtime.confines:
            log.warning("jobs_run_unconfined", runtime=choice.runtime.name, passed=choice.passed)
        found = controllers.find(os.environ.get("DURE_CGROUP_ROOT", ""))
        if found.layout is None:
            log.warning("jobs_have_no_limits", problem=found.problem)
        self.runtime = choice.runtime
        return LocalBackend(
            self.state_dir / "runs",
            machine,
            choice.runtime,
            self.clock,
            durations=Durations(leftover_kill_s=kill_s, lost_kill_s=kill_s),
            confinement=confinement(self.settings, found.layout),
        )

    def register(self) -> str:
        """Make tiers, nodes and, on an empty store, the first administrator.

        Returns the administrator's token when it has just been made, else an empty string.
        """
        self._registered = True
        named = declared(self.settings.tiers)
        for backend in self.backends.values():
            for node in backend.inventory().nodes:
                self._register(node, named)
        server = self.settings.server
        if not admin.bootstrap(self.engine, server.admin, server.admin_lab):
            return ""
        made = admin.make_token(
            self.engine, SystemIds(), UserId(server.admin), "first start", days=3650
        )
        keep_secret(self.state_dir / "admin-token", made.secret)
        return made.secret

    def _edge_node(self, node: Node) -> None:
        """A node that has joined: its tiers must exist before the engine hears of it."""
        if self._registered:
            self._register(node, declared(self.settings.tiers))

    def _register(self, node: Node, named: Mapping[str, Tier]) -> None:
        with self.store.read() as tx:
            existing: list[str] = [t.name for t in tx.tiers()]
        for tier in missing_tiers(node, existing, named):
            admin.put_tier(self.engine, "server", tier)
            existing.append(tier.name)
        unknown = sorted({g.tier for g in node.gpus} - set(existing))
        if unknown:
            log.warning("gpus_without_tier", tiers=unknown, hint="add [[tiers]] to the settings")
        admin.put_node(self.engine, "server", node)

    def close(self) -> None:
        """Stop what runs here; jobs go on under their supervisors."""
        self.lookout.stop()
        self.controller.stop()
        if self._edge is not None:
            self._edge.close()
        for backend in self.backends.values():
            backend.close()
        self.store.close()
        os.close(self._lock)


def yard(settings: Settings) -> Yard:
    """What this site puts into its jails."""
    shared = tuple(os.path.realpath(os.path.expanduser(p)) for p in settings.node.shared)  # noqa: PTH111 - both at once
    return Yard(host=host.look(), state_dir=str(settings.state_dir()), shared=shared)


def confinement(settings: Settings, layout: Layout | None) -> Confinement:
    """Limits and permissions of jobs on this machine."""
    node = settings.node
    allowed = (*node.workdirs, *node.shared)
    return Confinement(
        uid=os.getuid(),
        state_dir=str(settings.state_dir()),
        home=str(Path("~").expanduser()),
        workdirs=tuple(os.path.realpath(os.path.expanduser(p)) for p in allowed),  # noqa: PTH111 - both at once
        controllers=layout,
        processes=node.processes,
        output_limit_mib=node.output_limit_mib,
        log_limit_mib=node.log_limit_mib,
    )


def hold_alone(state_dir: Path) -> int:
    """Lock a state folder for this process; raise BAD_SETTING if another server has it.

    Two servers on one folder would both watch its run directories. The lock ends with the
    process, however it ends.
    """
    fd = os.open(state_dir / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        os.close(fd)
        used = f"{state_dir} is in use by another server (process {holder or 'unknown'})"
        raise DureError(ErrorCode.BAD_SETTING, key="server.state_dir", value=used) from error
    os.truncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def keep_secret(path: Path, secret: str) -> None:
    """Write a secret that only its owner can read, from the first byte on."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secret + "\n")
