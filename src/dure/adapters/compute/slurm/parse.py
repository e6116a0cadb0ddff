"""What Slurm's commands print, as values. Pure; the texts of versions differ only here.

Text output is parsed and not JSON: it has been the same for many releases, and the JSON of
an unreachable controller is an empty list with exit code 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dure.core.model import Value

JOB_FORMAT = "%A|%T|%S|%r|%k"
"""squeue -o: id, state, start, reason, comment; the comment is Dure's own words."""
SACCT_FORMAT = "JobIDRaw,State,ExitCode,DerivedExitCode,Start,End"
FINAL = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
OOM_SIGNAL = 125
"""Slurm's made-up signal number for a step that ran out of memory."""


class JobLine(Value, frozen=True, kw_only=True):
    """A job as squeue shows it."""

    id: int
    state: str
    start_ms: int | None = None
    reason: str = ""
    comment: str = ""


class Final(Value, frozen=True, kw_only=True):
    """How a Slurm job ended; `state` UNKNOWN: Slurm has forgotten it."""

    state: str
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    start_ms: int | None = None


class Gres(Value, frozen=True, kw_only=True):
    """GPUs of one type; the type may be empty."""

    type: str
    count: int


class NodeLine(Value, frozen=True, kw_only=True):
    """A node as scontrol shows it."""

    name: str
    states: tuple[str, ...]
    responding: bool
    reason: str
    gres: tuple[Gres, ...]
    used: tuple[Gres, ...]
    cores: int
    memory_mib: int
    partitions: tuple[str, ...]


class Partition(Value, frozen=True, kw_only=True):
    """A partition as scontrol shows it; `max_time_min` None: no limit."""

    name: str
    up: bool
    preempt_mode: str
    priority_tier: int
    max_time_min: int | None
    grace_s: int
    def_mem: bool


def job_lines(text: str) -> list[JobLine]:
    """Lines of `squeue -o JOB_FORMAT`; what is no such line is left out."""
    found = []
    for line in text.splitlines():
        parts = line.split("|", 4)
        if len(parts) == 5 and parts[0].isdigit():
            found.append(
                JobLine(
                    id=int(parts[0]),
                    state=parts[1],
                    start_ms=epoch_ms(parts[2]),
                    reason=parts[3],
                    comment=parts[4].strip(),
                )
            )
    return found


def epoch_ms(text: str) -> int | None:
    """A time under SLURM_TIME_FORMAT=%s; whole seconds are all that Slurm keeps."""
    return int(text) * 1000 if text.isdigit() and int(text) else None


def field(line: str, name: str) -> str:
    """`name=value` of a scontrol line; values with blanks end at the next key."""
    found = re.search(rf"(?:^|\s){re.escape(name)}=(.*?)(?=\s+[\w:/()*.-]+=|\s*$)", line)
    value = found.group(1) if found else ""
    return "" if value in ("(null)", "N/A", "n/s") else value


def finals(text: str) -> dict[int, Final]:
    """Ended jobs among the lines of `scontrol -o show job`."""
    found = {}
    for line in text.splitlines():
        number, state = field(line, "JobId"), field(line, "JobState")
        if number.isdigit() and state in FINAL:
            derived = _codes(field(line, "DerivedExitCode"))
            found[int(number)] = _final(
                state, _codes(field(line, "ExitCode")), derived, field(line, "StartTime")
            )
    return found


def sacct_finals(text: str) -> dict[int, Final]:
    """Ended jobs of `sacct -n -P -X -o SACCT_FORMAT`."""
    found = {}
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) != 6 or not parts[0].isdigit():
            continue
        state = parts[1].split(" ")[0].rstrip("+")  # "CANCELLED by 1000"
        if state in FINAL:
            found[int(parts[0])] = _final(state, _codes(parts[2]), _codes(parts[3]), parts[4])
    return found


def _codes(text: str) -> tuple[int, int]:
    code, _, signal = text.partition(":")
    return (int(code), int(signal)) if code.isdigit() and signal.isdigit() else (0, 0)


def _final(state: str, codes: tuple[int, int], derived: tuple[int, int], start: str) -> Final:
    code, signal = codes
    oom = state == "OUT_OF_MEMORY" or OOM_SIGNAL in (signal, derived[1])
    signal = 9 if signal == OOM_SIGNAL else signal
    return Final(
        state=state,
        exit_code=None if signal else code,
        signal=signal or None,
        out_of_memory=oom,
        start_ms=epoch_ms(start),
    )


def gres(text: str) -> tuple[Gres, ...]:
    """GPUs of `gpu:rtx4090:2(S:0-1),gpu:a100:4`, in order; other resources are left out."""
    found = []
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        names = part.strip().split(":")
        if names[0] == "gpu" and names[-1].isdigit():
            kind = names[1] if len(names) > 2 else ""
            found.append(Gres(type=kind, count=int(names[-1])))
    return tuple(found)


def node_lines(text: str) -> list[NodeLine]:
    """Nodes of `scontrol -d -o show node`."""
    found = []
    for line in text.splitlines():
        name, state = field(line, "NodeName"), field(line, "State")
        if not name or not state:
            continue
        reason = re.search(r"\sReason=(.*?)(?:\s+\[[^\]]*\])?\s*$", line)
        special = _number(field(line, "MemSpecLimit"))
        states = state.rstrip("*~#!%$@^-").split("+")
        found.append(
            NodeLine(
                name=name,
                states=tuple(s.rstrip("*~#!%$@^-") for s in states),
                responding="*" not in state and "NOT_RESPONDING" not in states,
                reason=reason.group(1) if reason else "",
                gres=gres(field(line, "Gres")),
                used=gres(field(line, "GresUsed")),
                cores=_number(field(line, "CPUEfctv")) or _number(field(line, "CPUTot")),
                memory_mib=max(0, _number(field(line, "RealMemory")) - special),
                partitions=tuple(p for p in field(line, "Partitions").split(",") if p),
            )
        )
    return found


def partitions(text: str) -> list[Partition]:
    """Partitions of `scontrol -o show partition`."""
    return [
        Partition(
            name=field(line, "PartitionName"),
            up=field(line, "State") == "UP",
            preempt_mode=field(line, "PreemptMode"),
            priority_tier=_number(field(line, "PriorityTier")),
            max_time_min=minutes(field(line, "MaxTime")),
            grace_s=_number(field(line, "GraceTime")),
            def_mem=any(
                field(line, name) not in ("", "UNLIMITED")
                for name in ("DefMemPerCPU", "DefMemPerNode", "DefMemPerGPU")
            ),
        )
        for line in text.splitlines()
        if field(line, "PartitionName")
    ]


def minutes(text: str) -> int | None:
    """A Slurm time, `days-hours:minutes:seconds` or shorter; None: no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        return None
    days, first, second, _ = (int(part or 0) for part in found.groups())
    if found.group(1):
        return days * 1440 + first * 60 + second
    return first * 60 + second if found.group(4) else first


def _number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found.group()) if found else 0


def config(text: str) -> dict[str, str]:
    """`scontrol show config` as key and value."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def ids(numbers: Iterable[int]) -> str:
    """Job ids as the commands take them."""
    return ",".join(str(number) for number in sorted(numbers))
