"""Jobs on this machine, each under a supervisor of its own that outlives the server.

Facts live in run directories; this class only holds what it has said about them. One
thread waits on the supervisors' sockets and looks after those that cannot be reached.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dure.adapters.compute.local.confinement import Confinement
from dure.adapters.compute.local.gpus import Machine
from dure.adapters.compute.local.leases import Chronicle, Held, Record, Shelf
from dure.adapters.compute.local.rundir import RunDir, Spec, Stop
from dure.adapters.compute.local.spawn import Spawner
from dure.adapters.compute.local.watch import Durations, Watch
from dure.core.model import Node
from dure.ports import (
    Clock,
    Freed,
    Inventory,
    LaunchOrder,
    LaunchResult,
    LaunchStatus,
    LeaseKey,
    LiveLease,
    Observation,
    Runtime,
    StopKind,
    StopOrder,
)

log = logging.getLogger(__name__)


class LocalBackend:
    """The `ComputeBackend` of this machine. Its lock is never held while waiting."""

    name = "local"

    def __init__(
        self,
        root: Path,
        machine: Machine,
        runtime: Runtime,
        clock: Clock,
        *,
        durations: Durations | None = None,
        confinement: Confinement | None = None,
    ) -> None:
        self._shelf = Shelf(root)
        self._machine = machine
        self._runtime = runtime
        self._clock = clock
        self._durations = durations or Durations()
        self._confinement = confinement or Confinement()
        self._lock = threading.Lock()
        self._chronicle = Chronicle(clock)
        self._record = Record(base=clock.now_ms() * 1000)
        self._held: dict[LeaseKey, Held] = {}
        self._spawner = Spawner()
        self._watch = Watch(
            lock=self._lock,
            held=self._held,
            shelf=self._shelf,
            record=self._record,
            chronicle=self._chronicle,
            spawner=self._spawner,
            node=self._node,
            durations=self._durations,
        )
        for key in self._shelf.live():
            self._find(key)
        self._watch.start()

    # -- port --

    def inventory(self) -> Inventory:
        """This machine, with its GPUs as they are now."""
        node = self._machine.node(wait=False)
        with self._lock:
            node = self._with_fenced(node)
        return Inventory(nodes=(msgspec.structs.replace(node, last_seen_ms=self._clock.now_ms()),))

    def launch(self, orders: Sequence[LaunchOrder]) -> list[LaunchResult]:
        """Write each order down and queue its supervisor; the watch spawns a few at a time."""
        node = self._machine.node()
        with self._lock:
            results = [self._launch(order, node) for order in orders]
        self._watch.wake()
        return results

    def stop(self, orders: Sequence[StopOrder]) -> None:
        """Write each order down, then send it; a supervisor that is not up reads it later."""
        with self._lock:
            for order in orders:
                held = self._held.get(order.key)
                if held is not None and not held.freed:
                    self._stop(held, Stop(stop=order.kind, kill_after_s=order.kill_after_s))

    def fence(self, keys: Sequence[LeaseKey]) -> None:
        """Mark them for ever, and stop what runs."""
        with self._lock:
            for key in keys:
                self._shelf.run(key).fence()
                held = self._held.get(key)
                if held is not None:
                    held.fenced = True
                    if not held.freed:
                        kill_s = self._durations.lost_kill_s
                        self._stop(held, Stop(stop=StopKind.LOST, kill_after_s=kill_s))
                    held.look_at = 0.0
        self._watch.wake()

    def observe(self, cursor: int) -> tuple[list[Observation], int]:
        """What has been seen after `cursor`."""
        with self._lock:
            return self._record.read(cursor, self._recorded)

    def leases(self) -> list[LiveLease]:
        """Every lease whose end is not recorded, except fenced ones."""
        with self._lock:
            held = [held for held in self._held.values() if not held.fenced]
            return [LiveLease(key=h.key, phase=h.phase) for h in held]

    def watch(self, hint: Callable[[], None]) -> None:
        """Remember whom to tell."""
        self._watch.hint = hint

    def log_path(self, key: LeaseKey) -> str | None:
        """The attempt's log, once there is one."""
        log = self._shelf.run(key).log
        return str(log) if log.is_file() else None

    def output_dir(self, key: LeaseKey) -> str | None:
        """The attempt's output folder, once there is one."""
        out = self._shelf.run(key).out
        return str(out) if out.is_dir() else None

    def workdir_refusal(self, workdir: str, unix_uid: int) -> str:
        """Why a job of this Unix user could not start in `workdir`; empty if it could."""
        user = self._confinement.runs_as(unix_uid)
        return self._confinement.refusal(workdir, user, confines=self._runtime.confines)

    def close(self) -> None:
        """Stop watching; supervisors and jobs go on."""
        self._watch.close()

    # -- inside --

    def _find(self, key: LeaseKey) -> None:
        """A lease of an earlier life of this server."""
        run = self._shelf.run(key)
        spec = run.spec()
        if spec is None:
            self._shelf.collect(key)
            return
        held = Held(key=key, run=run, gpus=spec.gpus, fenced=run.fenced, stop=run.stop())
        self._held[key] = held
        if run.untouched:
            self._watch.enqueue(held)  # written down, but the server died before the spawn
        else:
            held.spawned_at = time.monotonic()
            held.spawns = 1

    def _launch(self, order: LaunchOrder, node: Node) -> LaunchResult:
        key = order.key
        run = self._shelf.run(key)
        if run.fenced:
            return LaunchResult(key=key, status=LaunchStatus.REFUSED, reason="fenced")
        if key in self._held or run.spec() is not None:
            return LaunchResult(key=key, status=LaunchStatus.ACCEPTED)
        reason = self._confinement.unfit(order, confines=self._runtime.confines)
        if reason:
            return LaunchResult(key=key, status=LaunchStatus.REFUSED, reason=reason)
        try:
            run.create()
            self._shelf.open(key)
            run.write("spec.json", self._spec(order, run, node))
        except OSError as error:
            reason = f"the run directory cannot be written: {error.strerror}"
            return LaunchResult(key=key, status=LaunchStatus.REFUSED, reason=reason)
        held = Held(key=key, run=run, gpus=order.gpus)
        self._held[key] = held
        self._watch.enqueue(held)
        return LaunchResult(key=key, status=LaunchStatus.ACCEPTED)

    def _spec(self, order: LaunchOrder, run: RunDir, node: Node) -> Spec:
        limits = self._confinement
        data_mib = order.vram_mib if order.simulated else 0
        grant = limits.grant(order, run, node, data_mib=data_mib, confines=self._runtime.confines)
        command = self._runtime.command(order, grant)
        names = ("JOB_ID", "DURE_JOB_EPOCH", "JOB_OUTPUT_DIR")
        return Spec(
            argv=command.argv,
            env=command.env,
            cwd=command.cwd or str(run.out),
            # The folder tells this server's jobs from another's with the same numbers.
            marks=tuple(f"{n}={command.env[n]}" for n in names if n in command.env),
            gpus=order.gpus,
            boot_id=self._chronicle.boot_id,
            time_limit_s=order.time_limit_s,
            pre_stop_signal=order.pre_stop_signal,
            pre_stop_before_s=order.pre_stop_before_s,
            kill_after_s=order.kill_after_s,
            leftover_kill_s=self._durations.leftover_kill_s,
            data_limit_mib=data_mib,
            output_limit_mib=limits.output_limit_mib,
            log_limit_mib=limits.log_limit_mib,
            quota_every_s=limits.quota_every_s,
            copy_from=self._shelf.earlier_output(order.key, order.copy_from_epoch),
            files=command.files,
            inside=command.inside,
            cgroup=limits.group(run),
            limits=limits.limits(order),
        )

    def _stop(self, held: Held, stop: Stop) -> None:
        if held.stop is None or stop.kill_after_s < held.stop.kill_after_s:
            held.stop = stop
            try:
                held.run.write("stop.json", stop)
            except OSError as error:  # a full disk must not keep a job from being stopped
                log.warning("job %d: the stop order is not on disk: %s", held.key.job, error)
        self._watch.send_stop(held)

    def _recorded(self, observation: Observation) -> None:
        """The engine has recorded this; after the last of a lease nothing is held."""
        if isinstance(observation, Freed):
            self._held.pop(observation.key, None)
            self._shelf.collect(observation.key)

    def _node(self) -> Node:
        """The node for the watch, which holds the lock."""
        return self._with_fenced(self._machine.node())

    def _with_fenced(self, node: Node) -> Node:
        """A fenced lease reports nothing, but its processes still use the GPU."""
        used = {gpu for h in self._held.values() if h.fenced and not h.freed for gpu in h.gpus}
        if not used:
            return node
        gpus = [
            msgspec.structs.replace(gpu, foreign=True) if gpu.index in used else gpu
            for gpu in node.gpus
        ]
        return msgspec.structs.replace(node, gpus=tuple(gpus))
