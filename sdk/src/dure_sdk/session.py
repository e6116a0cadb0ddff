"""System metrics of one run in this process: who collects what, and an orderly, bounded end."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from dure_sdk import mlflow_state, timing, words
from dure_sdk.monitor import Monitor, Plan
from dure_sdk.names import Rename, renamer, safe_node
from dure_sdk.notices import Causes, say, warn
from dure_sdk.sender import Sender
from dure_sdk.transport import transport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dure_sdk.collectors import Built
    from dure_sdk.ranks import Rank

TAG = "dure.sysmetrics."
SAMPLER_LIMIT_S = 2.5
"""For the last sample; a driver that hangs is left behind."""
NEIGHBOUR_LIMIT_S = 5.0


class Asked(NamedTuple):
    """One call of `enable_system_metrics`, resolved."""

    run_id: str
    uri: str
    rank: Rank
    all_workers: bool
    timing: timing.Timing
    node: str | None


class Session:
    """Monitor and sender of one run. The order of the end is: monitor, flush, detach."""

    def __init__(self, asked: Asked) -> None:
        self.run_id = asked.run_id
        self.pid = os.getpid()
        self._asked = asked
        self._causes = Causes()
        suffix = f"/rank{asked.rank.rank}"
        self.transport = transport(asked.uri, asked.run_id)
        self.sender = Sender(self.transport, suffix, self._causes)
        self._opened = asked.run_id in (mlflow_state.open_run_ids() or ())
        self._words = words.Words(asked.rank.rank, self._fixed_words())
        self.monitor = self._monitor() if self._collects() else None

    def start(self) -> None:
        """Start both threads; nothing here waits."""
        self.sender.tag(self._tags())
        self.sender.start()
        if self.monitor is not None:
            self.monitor.start()

    @property
    def alive(self) -> bool:
        """Whether samples are still taken, by this process and not by the one it came from."""
        return self.pid == os.getpid() and self.monitor is not None and self.monitor.alive

    def stop(self, limit_s: float) -> bool:
        """Last sample, flush, end; True if everything reached the server."""
        if self.pid != os.getpid():
            return True  # the threads are the parent's
        end_s = time.monotonic() + limit_s
        if self.monitor is not None:
            if not self.monitor.stop(min(SAMPLER_LIMIT_S, limit_s)):
                self._causes.warn("sampler", "the last sample is left out: a collector hangs")
            if not self.monitor.points and not self._rest:
                self._empty()
        sent = self.sender.close(max(end_s - time.monotonic(), 0))
        self._tell_end()
        return sent

    @property
    def _rest(self) -> bool:
        rank = self._asked.rank
        return rank.source == "slurm" and not rank.first_here

    def _collects(self) -> bool:
        """Rank 0 alone, or one worker per pod; Slurm's others for what the first cannot see."""
        rank = self._asked.rank
        return rank.rank == 0 or (self._asked.all_workers and (rank.first_here or self._rest))

    def _monitor(self) -> Monitor:
        asked = self._asked
        node_series = os.environ.get("DURE_NODE_SERIES") != "agent"
        rename = renamer(asked.rank.rank, asked.node, node_series=node_series)
        plan = Plan(
            asked.timing.interval_s,
            asked.timing.samples,
            f"rank {asked.rank.rank} on {asked.node or 'an unnamed node'}",
            self._over,
            self._not_shown_by_first if self._rest else None,
            self._rest,
        )
        return Monitor(
            plan,
            lambda: self._build(rename),
            self.sender.put,
            self._tag_end,
            self._words.write,
            self._tag_used,
            self._causes,
        )

    def _build(self, rename: Rename) -> Built:
        from dure_sdk import collectors

        asked = self._asked
        if mlflow_state.stock_monitor_runs(asked.run_id):
            warn(
                "MLflow's own system metrics run for this run too and mix into its charts; "
                f"remove {mlflow_state.SWITCH} and log_system_metrics=True"
            )
        return collectors.build(
            asked.run_id,
            asked.uri,
            rename,
            asked.timing.interval_s,
            self._causes,
            own_only=self._rest,
        )

    def _over(self) -> bool:
        """The program ended the run by MLflow's own call: its charts must end there, too."""
        if not self._opened:
            return False
        runs = mlflow_state.open_run_ids()
        return runs is not None and self.run_id not in runs

    def _not_shown_by_first(self, built: Built, values: Mapping[str, float]) -> dict[str, float]:
        """Under srun: GPUs that the node's first rank cannot see, and a cgroup of its own."""
        first = self._first_words()
        shown = (first or {}).get("gpus")
        hidden = [
            f"gpu_{gpu.position}_"
            for gpu in (built.gpu.gpus if built.gpu else {}).values()
            if isinstance(shown, list) and gpu.uuid in shown
        ]
        if first and built.cgroup and built.cgroup.facts().get("cgroup") == first.get("cgroup"):
            hidden.append("container_")
        return {k: v for k, v in values.items() if not k.startswith(tuple(hidden))}

    def _first_words(self) -> dict[str, object] | None:
        """Of the first rank here; waited for a little, at the first sample only."""
        until_s = time.monotonic() + (
            0 if self.monitor and self.monitor.points else NEIGHBOUR_LIMIT_S
        )
        while True:
            found = words.first_here(words.folder(), socket.gethostname(), words.step())
            if found is not None or time.monotonic() >= until_s:
                return found
            time.sleep(0.1)

    def _tags(self) -> dict[str, str]:
        rank = self._asked.rank
        tags = {f"{TAG}rank{rank.rank}": self._asked.node or "unknown"}
        if rank.rank == 0:
            tags[f"{TAG}interval_s"] = f"{self._asked.timing.interval_s:g}"
            tags[f"{TAG}samples"] = str(self._asked.timing.samples)
            tags[f"{TAG}collectors"] = str(rank.pods if self._asked.all_workers else 1)
        return tags

    def _tag_end(self, said: dict[str, str]) -> None:
        """The monitor's tags: rank 0 speaks for the run, another rank for itself."""
        rank = self._asked.rank.rank
        prefix = TAG if rank == 0 else f"{TAG}rank{rank}."
        self.sender.tag({k if k.startswith("dure.") else prefix + k: v for k, v in said.items()})

    def _tag_used(self, built: Built) -> None:
        """After the first sample: what was really used, and which GPU is behind `gpu_<i>`."""
        from dure_sdk import versions

        rank = self._asked.rank.rank
        tags = versions.tags() if rank == 0 else {}
        for gpu in (built.gpu.gpus if built.gpu else {}).values():
            tags[f"{TAG}rank{rank}.gpu_{gpu.position}"] = f"{gpu.uuid} {gpu.model}"
        if tags:
            self.sender.tag(tags)

    def _fixed_words(self) -> dict[str, object]:
        return {
            "run_id": self.run_id,
            "node": self._asked.node,
            "local_rank": self._asked.rank.local_rank,
            "pid": os.getpid(),
            "interval_s": self._asked.timing.interval_s,
        }

    def _empty(self) -> None:
        interval_s = self._asked.timing.interval_s
        say("no system metrics were recorded in this run")
        self.sender.tag({"dure.warn.system_metrics_empty": f"run < {interval_s:g}s"})

    def _tell_end(self) -> None:
        if self.sender.left:
            warn(f"MLflow does not answer: {self.sender.left} samples could not be sent")
        if self.sender.dropped:
            warn(f"{self.sender.dropped} samples were dropped in this run")


def node_name() -> str | None:
    """The node as Kubernetes' downward API or Dure's agent names it; never guessed."""
    return safe_node(os.environ.get("NODE_NAME"))
