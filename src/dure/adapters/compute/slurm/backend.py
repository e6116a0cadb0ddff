"""Jobs on a Slurm cluster, each a batch job pinned to the node that the planner chose.

The port's calls only write down and wake the watch: no caller waits for Slurm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dure.adapters.compute.local.leases import Record
from dure.adapters.compute.local.rundir import Spec, Stop
from dure.adapters.compute.slurm import submit
from dure.adapters.compute.slurm.commands import Commands
from dure.adapters.compute.slurm.leases import Durations, Lease, Story
from dure.adapters.compute.slurm.nodes import Mapped
from dure.adapters.compute.slurm.site import (
    Account,
    Launched,
    Site,
    account_of,
    own_account,
)
from dure.adapters.compute.slurm.state import State
from dure.adapters.compute.slurm.talk import Talk
from dure.adapters.compute.slurm.watch import Watch
from dure.ports import (
    Clock,
    Freed,
    Grant,
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

UNSENT = 256
"""Launches that may wait for Slurm: more are asked again by the engine's sweep."""


class SlurmBackend:
    """The `ComputeBackend` of one cluster. Its lock is never held while waiting for Slurm."""

    name = "slurm"

    def __init__(
        self,
        run_root: Path,
        state: Path,
        commands: Commands,
        runtime: Runtime,
        clock: Clock,
        *,
        mapped: Mapped | None = None,
        options: submit.Options | None = None,
        accounts: dict[str, str] | None = None,
        durations: Durations | None = None,
        file_limit_mib: int = 0,
    ) -> None:
        self._site = Site(run_root.absolute(), state.absolute())
        self._runtime = runtime
        self._clock = clock
        self._options = options or submit.Options()
        self._accounts = accounts or {}
        self._durations = durations or Durations()
        self._file_limit_mib = file_limit_mib
        self._state = State(
            record=Record(base=clock.now_ms() * 1000), mapped=mapped or Mapped(), clock=clock
        )
        story = Story(clock, self._durations)
        talk = Talk(commands, self._site, self._options, self._state.mapped, self._durations)
        self._watch = Watch(self._state, self._site, talk, story, self._durations)
        for key in self._site.book.live():
            self._find(key)
        self._watch.start()

    # -- port --

    def inventory(self) -> Inventory:
        """The nodes as Slurm last told, and whether that was just now."""
        with self._state.lock:
            nodes = tuple(self._state.nodes[name] for name in sorted(self._state.nodes))
            return Inventory(nodes=nodes, unreachable=self._state.problem)

    def launch(self, orders: Sequence[LaunchOrder]) -> list[LaunchResult]:
        """Write each order down; the watch submits. UNKNOWN when Slurm cannot keep up."""
        results = []
        for order in orders:
            with self._state.lock:
                results.append(self._launch(order))
        self._watch.wake()
        return results

    def stop(self, orders: Sequence[StopOrder]) -> None:
        """Write each order down where the node reads it, then let the watch signal it."""
        with self._state.lock:
            for order in orders:
                lease = self._state.leases.get(order.key)
                if lease is not None and not lease.freed:
                    self._stop(lease, Stop(stop=order.kind, kill_after_s=order.kill_after_s))
        self._watch.wake()

    def fence(self, keys: Sequence[LeaseKey]) -> None:
        """Mark them for ever, and stop what runs."""
        with self._state.lock:
            for key in keys:
                self._site.book.run(key).fence()
                lease = self._state.leases.get(key)
                if lease is not None:
                    lease.fenced = True
                    if not lease.freed:
                        kill_s = self._durations.lost_kill_s
                        self._stop(lease, Stop(stop=StopKind.LOST, kill_after_s=kill_s))
        self._watch.wake()

    def observe(self, cursor: int) -> tuple[list[Observation], int]:
        """What has been seen after `cursor`."""
        with self._state.lock:
            return self._state.record.read(cursor, self._recorded)

    def leases(self) -> list[LiveLease]:
        """Every lease whose end is not recorded, except fenced ones."""
        with self._state.lock:
            held = [lease for lease in self._state.leases.values() if not lease.fenced]
            return [LiveLease(key=lease.key, phase=lease.phase) for lease in held]

    def watch(self, hint: Callable[[], None]) -> None:
        """Remember whom to tell."""
        self._watch.hint = hint

    def log_path(self, key: LeaseKey) -> str | None:
        """The attempt's log, once there is one; a link in its place is none."""
        log_file = self._site.run(key).log
        return str(log_file) if log_file.is_file() and not log_file.is_symlink() else None

    def output_dir(self, key: LeaseKey) -> str | None:
        """The attempt's output folder, once there is one."""
        out = self._site.run(key).out
        return str(out) if out.is_dir() and not out.is_symlink() else None

    def close(self) -> None:
        """Stop watching; jobs go on in Slurm."""
        self._watch.close()

    # -- inside --

    def _find(self, key: LeaseKey) -> None:
        """A lease of an earlier life of this server."""
        launched = self._site.launched(key)
        if launched is None:
            self._site.book.collect(key)
            return
        stop = self._site.stop_order(key)
        lease = self._lease(key, launched)
        lease.fenced = self._site.book.run(key).fenced
        lease.stop = stop
        lease.stop_at = lease.signal_at = time.monotonic() if stop is not None else 0.0
        self._state.leases[key] = lease

    def _lease(self, key: LeaseKey, launched: Launched) -> Lease:
        return Lease(key=key, launched=launched, run=self._site.run(key), held_at=time.monotonic())

    def _launch(self, order: LaunchOrder) -> LaunchResult:
        key = order.key
        if self._site.book.run(key).fenced:
            return LaunchResult(key=key, status=LaunchStatus.REFUSED, reason="fenced")
        if key in self._state.leases or self._site.launched(key) is not None:
            return LaunchResult(key=key, status=LaunchStatus.ACCEPTED)
        if self._state.problem or len(self._state.unsent()) >= UNSENT:
            why = self._state.problem or "Slurm takes launches more slowly than they come"
            return LaunchResult(key=key, status=LaunchStatus.UNKNOWN, reason=why)
        launched = self._planned(order)
        if isinstance(launched, str):
            return LaunchResult(key=key, status=LaunchStatus.REFUSED, reason=launched)
        try:
            self._site.prepare(key, self._spec(launched), launched.account)
            self._site.record(key, launched)
            self._site.book.open(key)
        except OSError as error:
            reason = f"the run directory cannot be written: {error.strerror}"
            return LaunchResult(key=key, status=LaunchStatus.REFUSED, reason=reason)
        self._state.leases[key] = self._lease(key, launched)
        return LaunchResult(key=key, status=LaunchStatus.ACCEPTED)

    def _planned(self, order: LaunchOrder) -> Launched | str:
        """Where and as whom the order runs, or why it cannot."""
        slot = self._state.slots.get(order.placement.node, {}).get(order.placement.tier)
        if slot is None:
            return f"no partition of Slurm reaches {order.placement.tier} on this node"
        account = self._account(order.user)
        if account is None:
            unix = self._accounts.get(order.user, order.user)
            return f"user {order.user} has no account {unix} on this machine ([slurm] accounts)"
        if not order.command:
            return "the command is empty"
        if order.workdir and not _is_dir(order.workdir):
            return f"workdir {order.workdir} is not a folder that this server can see"
        return Launched(
            order=order,
            partition=slot.partition,
            gres_type=slot.gres_type,
            account=account,
            time_limit_min=submit.time_limit_min(order.time_limit_s, order.kill_after_s),
        )

    def _account(self, user: str) -> Account | None:
        if not self._options.as_user:
            return own_account()
        return account_of(self._accounts.get(user, user))

    def _spec(self, launched: Launched) -> bytes:
        order, account = launched.order, launched.account
        run = self._site.run(order.key)
        data_mib = order.vram_mib if order.simulated else 0
        grant = Grant(
            run_dir=str(run.path),
            output_dir=str(run.out),
            gpu_uuids=(),
            cores=order.cores,
            memory_mib=order.memory_mib,
            data_limit_mib=data_mib,
        )
        command = self._runtime.command(order, grant)
        own = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}
        env = {**command.env, **{n: v for n, v in own.items() if n not in order.env and v}}
        marks = ("JOB_ID", "DURE_JOB_EPOCH", "JOB_OUTPUT_DIR")
        spec = Spec(
            argv=command.argv,
            env=env,
            cwd=order.workdir or str(run.out),
            marks=tuple(f"{name}={env[name]}" for name in marks if name in env),
            gpus=order.gpus,
            time_limit_s=order.time_limit_s,
            pre_stop_signal=order.pre_stop_signal,
            pre_stop_before_s=order.pre_stop_before_s,
            kill_after_s=order.kill_after_s,
            leftover_kill_s=self._durations.lost_kill_s,
            data_limit_mib=data_mib,
            output_limit_mib=self._file_limit_mib,
            copy_from=self._site.earlier_output(order.key, order.copy_from_epoch),
        )
        simulated = {"slurm_simulated": order.simulated}
        return msgspec.json.encode({**msgspec.to_builtins(spec), **simulated})

    def _stop(self, lease: Lease, stop: Stop) -> None:
        if lease.stop is not None and stop.kill_after_s >= lease.stop.kill_after_s:
            return
        lease.stop = stop
        lease.stop_at = lease.stop_at or time.monotonic()
        lease.signal_at = time.monotonic()
        self._site.order_stop(lease.key, stop)

    def _recorded(self, observation: Observation) -> None:
        """The engine has recorded this; after the last of a lease nothing is held."""
        if isinstance(observation, Freed):
            self._state.drop(observation.key)
            self._site.book.collect(observation.key)


def _is_dir(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False
