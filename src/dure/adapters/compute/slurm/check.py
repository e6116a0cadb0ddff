"""What a Slurm cluster has and lacks for Dure: findings as values, advice as text.

Pure but for `look`, which asks Slurm four questions and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dure.adapters.compute.slurm import nodes, parse
from dure.adapters.compute.slurm.commands import Commands
from dure.core.model import NodeHealth, Value

SHORTEST_AGE_S = 60
FAST = {
    "batch_sched_delay": "0",
    "sched_min_interval": "0",
    "bf_interval": "5",
    "bf_continue": "",
    "preempt_youngest_first": "",
}
"""SchedulerParameters with which an idle GPU is given out within a second, not three."""


class Cluster(Value, frozen=True, kw_only=True):
    """What Slurm answered; `problem` says why it did not."""

    problem: str = ""
    version: str = ""
    answer_s: float = 0.0
    config: dict[str, str] = {}
    nodes: tuple[parse.NodeLine, ...] = ()
    partitions: tuple[parse.Partition, ...] = ()


class Finding(Value, frozen=True):
    """One thing looked at: `ok`, `warn` or `fail`, and a sentence."""

    name: str
    status: str
    detail: str


def look(commands: Commands) -> Cluster:
    """Ask Slurm what it is."""
    version = commands.run(["sbatch", "--version"])
    if not version.ok:
        return Cluster(problem=version.problem)
    config = commands.run(["scontrol", "show", "config"])
    lines = commands.run(["scontrol", "-d", "-o", "show", "node"])
    partitions = commands.run(["scontrol", "-o", "show", "partition"])
    bad = next((answer for answer in (config, lines, partitions) if not answer.ok), None)
    if bad is not None:
        return Cluster(problem=bad.problem, version=version.out.strip())
    return Cluster(
        version=version.out.strip(),
        answer_s=max(config.took_s, lines.took_s),
        config=parse.config(config.out),
        nodes=tuple(parse.node_lines(lines.out)),
        partitions=tuple(parse.partitions(partitions.out)),
    )


def findings(
    cluster: Cluster,
    mapped: nodes.Mapped,
    *,
    run_root: str,
    python: str,
    as_user: bool,
    is_root: bool,
) -> list[Finding]:
    """Everything worth a line, what must change first to what is only good to know."""
    found = [_permission(as_user, is_root), _run_root(run_root), _python(python)]
    if cluster.problem:
        return [Finding("slurm", "fail", cluster.problem), *found]
    slow = cluster.answer_s > 2
    detail = f"{cluster.version}, answers in {cluster.answer_s:.2f} s"
    return [
        Finding("slurm", "warn" if slow else "ok", detail),
        *found,
        *_gpus(cluster, mapped),
        *_partitions(cluster, mapped),
        *_settings(cluster),
    ]


def _permission(as_user: bool, is_root: bool) -> Finding:
    if as_user and not is_root:
        text = "submitting under users' accounts needs root; or set slurm.as_user = false"
        return Finding("permission", "fail", text)
    if as_user:
        return Finding("permission", "ok", "root: each job runs under its user's account")
    text = "every job runs under this server's account: users are not kept from each other"
    return Finding("permission", "warn", text)


def _run_root(run_root: str) -> Finding:
    if not run_root:
        return Finding("run_root", "fail", "slurm.run_root is empty: name a shared folder")
    path = Path(run_root).expanduser()
    existing = next(p for p in (path, *path.parents) if p.exists())
    if not os.access(existing, os.W_OK):
        return Finding("run_root", "fail", f"{existing} cannot be written by this account")
    shut = [p for p in (existing, *existing.parents) if not p.stat().st_mode & 0o001]
    if shut:
        text = f"{shut[-1]} is closed to other accounts: jobs cannot reach {path} (chmod o+x)"
        return Finding("run_root", "fail", text)
    text = f"{path}; it must be the same folder on every node, which only a job can show"
    return Finding("run_root", "ok", text)


def _python(python: str) -> Finding:
    if Path(python).exists():
        return Finding("python", "ok", f"{python} is here; the nodes need it too (3.9 or newer)")
    text = f"{python} is not on this machine; the nodes need it (slurm.python, 3.9 or newer)"
    return Finding("python", "warn", text)


def _gpus(cluster: Cluster, mapped: nodes.Mapped) -> Iterator[Finding]:
    usable = [line for line in cluster.nodes if nodes.usable(line, mapped)]
    if not usable:
        text = "no node with GPUs in a partition that Dure may use (GresTypes=gpu, gres.conf)"
        yield Finding("gpus", "fail", text)
        return
    counts: dict[str, int] = {}
    for line in usable:
        made = nodes.node(line, mapped)
        for gpu in made.gpus:
            counts[gpu.tier] = counts.get(gpu.tier, 0) + 1
        if made.health is not NodeHealth.STABLE:
            yield Finding("node", "warn", f"{line.name} takes no work: {made.drain_reason}")
        if any(not part.type for part in line.gres):
            text = f"{line.name}: GPUs without a type; name their tier by partition (slurm.tiers)"
            yield Finding("node", "warn", text)
    told = ", ".join(f"{tier} × {count}" for tier, count in sorted(counts.items()))
    yield Finding("gpus", "ok", f"{len(usable)} nodes: {told}")


def _partitions(cluster: Cluster, mapped: nodes.Mapped) -> Iterator[Finding]:
    known = {part.name: part for part in cluster.partitions}
    used = {
        slot.partition
        for line in cluster.nodes
        if nodes.usable(line, mapped)
        for slot in nodes.slots(line, mapped).values()
    }
    for name in sorted({*used, *mapped.partitions.values(), *mapped.preemptible}):
        part = known.get(name)
        if part is None:
            yield Finding("partition", "fail", f"{name} does not exist")
        elif not part.up:
            yield Finding("partition", "fail", f"{name} is not UP")
        else:
            yield _partition(part, mapped, cluster)


def _partition(part: parse.Partition, mapped: nodes.Mapped, cluster: Cluster) -> Finding:
    memory = "Memory" in cluster.config.get("SelectTypeParameters", "")
    if part.name in mapped.preemptible:
        if part.preempt_mode == "OFF":
            return Finding("partition", "fail", f"{part.name}: PreemptMode=OFF, jobs never yield")
        if part.grace_s:
            text = f"{part.name}: GraceTime={part.grace_s} adds up to 30 s; KillWait is the grace"
            return Finding("partition", "warn", text)
    elif part.preempt_mode not in ("OFF", ""):
        text = f"{part.name}: research can be preempted (PreemptMode={part.preempt_mode})"
        return Finding("partition", "warn", text)
    if memory and not part.def_mem:
        text = f"{part.name}: without DefMemPerCPU other jobs take a whole node's memory"
        return Finding("partition", "warn", text)
    limit = "no time limit" if part.max_time_min is None else f"MaxTime {part.max_time_min} min"
    return Finding("partition", "ok", f"{part.name}: {limit}, PriorityTier {part.priority_tier}")


def _settings(cluster: Cluster) -> Iterator[Finding]:
    config = cluster.config
    if config.get("SelectType") != "select/cons_tres":
        text = f"SelectType={config.get('SelectType', '')} does not count GPUs: select/cons_tres"
        yield Finding("select", "fail", text)
    age = _seconds(config.get("MinJobAge", ""))
    enough = age >= SHORTEST_AGE_S
    text = f"MinJobAge {age} s" + ("" if enough else f": below {SHORTEST_AGE_S}, ends may be lost")
    yield Finding("min_job_age", "ok" if enough else "warn", text)
    if config.get("ProctrackType") == "proctrack/cgroup":
        yield Finding("cgroups", "ok", "memory is limited and a job out of memory is recognised")
    else:
        text = f"{config.get('ProctrackType', '')}: memory is not limited, OOM is not recognised"
        yield Finding("cgroups", "warn", text)
    if config.get("PreemptType", "preempt/none") == "preempt/none":
        yield Finding("preemption", "warn", "PreemptType=preempt/none: backfill cannot yield")
    else:
        yield Finding("preemption", "ok", config["PreemptType"])
    if config.get("AccountingStorageType", "").endswith("slurmdbd"):
        yield Finding("accounting", "ok", "slurmdbd: ends are known beyond MinJobAge")
    else:
        text = "no slurmdbd: ends come from run directories, and from Slurm within MinJobAge"
        yield Finding("accounting", "ok", text)
    given = config.get("SchedulerParameters", "").split(",")
    lacking = [item for item in _fast() if item not in given]
    if lacking:
        text = f"SchedulerParameters without {','.join(lacking)}: jobs start up to 3 s later"
        yield Finding("scheduler", "warn", text)


def _fast() -> list[str]:
    return [f"{key}={value}" if value else key for key, value in FAST.items()]


def _seconds(text: str) -> int:
    number = text.partition(" ")[0]
    return int(number) if number.isdigit() else 0


def advice(cluster: Cluster, mapped: nodes.Mapped) -> str:
    """Lines to add to slurm.conf: one partition a tier, one that yields, and how."""
    tiers: dict[str, list[str]] = {}
    for line in cluster.nodes:
        kinds = {mapped.tier(part.type, line.partitions) for part in line.gres}
        for tier in kinds if not mapped.nodes or line.name in mapped.nodes else ():
            tiers.setdefault(tier, []).append(line.name)
    names = sorted({name for names in tiers.values() for name in names})
    if not names:
        return "# No node has GPUs: set GresTypes=gpu, Gres= at the nodes and gres.conf first.\n"
    yields = next(iter(mapped.preemptible), "backfill")
    text = [
        "# For slurm.conf. Research is never preempted; what stands in the last partition yields.",
        *(_tier_line(mapped, tier, on) for tier, on in sorted(tiers.items())),
        f"PartitionName={yields} Nodes={','.join(names)} PriorityTier=1 {_YIELDS}",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "# An idle GPU is given out within a second instead of three.",
        f"SchedulerParameters={','.join(_fast())}",
        "# KillWait is the grace of preempted jobs; Dure's own stops do not depend on it.",
        "KillWait=30",
        "MinJobAge=300",
    ]
    return "\n".join(text) + "\n"


_YIELDS = "PreemptMode=REQUEUE GraceTime=0 DefMemPerCPU=1024 State=UP"
_STAYS = "PriorityTier=10 PreemptMode=OFF DefMemPerCPU=1024 MaxTime=UNLIMITED State=UP"


def _tier_line(mapped: nodes.Mapped, tier: str, on: list[str]) -> str:
    name = mapped.partitions.get(tier, f"dure-{tier.lower()}")
    return f"PartitionName={name} Nodes={','.join(sorted(on))} {_STAYS}"
