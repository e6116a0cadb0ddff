"""Between typed values and the flat strings of the scripts and hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dure.core.lease import (
    BeatAnswer,
    BeatReply,
    Bye,
    Changes,
    Expired,
    LeaseVerdict,
    NodeMark,
    NodeReport,
    NodeView,
    NodeViews,
    Projection,
    Report,
    Swept,
    Task,
    TaskStatus,
    TaskView,
)
from dure.core.model import JobId, NodeHealth, NodeId


class Stop(msgspec.Struct, frozen=True):
    """A stop order as the task's hash keeps it."""

    stop: str
    kill_after_s: float


def stop_text(stop: str, kill_after_s: float) -> str:
    """A stop order for the hash."""
    return msgspec.json.encode(Stop(stop, kill_after_s)).decode()


def enqueue_args(task: Task) -> Sequence[str | bytes | int]:
    """Arguments of `enqueue`."""
    return (
        int(task.job),
        task.epoch,
        task.node,
        task.payload,
        task.need_vram_mib,
        int(task.idempotent),
        task.max_retries,
    )


def projection_args(task: Projection) -> Sequence[str | bytes | int]:
    """Arguments of `project`."""
    return (
        int(task.job),
        task.epoch,
        task.status.value,
        task.retries,
        task.due_ms,
        task.node_wait_count,
        task.node_lost_count,
    )


def digest(result: bytes) -> str:
    """What a repeated result is compared by."""
    return hashlib.sha256(result).hexdigest()


def report_args(report: Report) -> Sequence[str | bytes | int]:
    """Arguments of `report`."""
    ticket = report.ticket
    return (
        int(ticket.job),
        ticket.epoch,
        ticket.lease_id,
        report.end.value,
        report.result,
        digest(report.result),
        report.detail,
        max(0, report.age_ms),
        -1 if report.started_age_ms is None else max(0, report.started_age_ms),
        -1 if report.freed_age_ms is None else max(0, report.freed_age_ms),
    )


def verdict(text: str) -> LeaseVerdict:
    """One answer of a beat; CANCEL carries the order behind it."""
    if text.startswith(BeatAnswer.CANCEL):
        stop = msgspec.json.decode(text.removeprefix(BeatAnswer.CANCEL), type=Stop)
        return LeaseVerdict(
            answer=BeatAnswer.CANCEL, stop=stop.stop, kill_after_s=stop.kill_after_s
        )
    return LeaseVerdict(answer=BeatAnswer(text))


def beat_reply(out: Sequence[bytes]) -> BeatReply:
    """Answer of `beat`."""
    state, *texts = (text.decode() for text in out)
    verdicts = tuple(verdict(text) for text in texts)
    return BeatReply(verdicts=verdicts, state=NodeHealth(state) if state else None)


def swept(out: Sequence[bytes]) -> Swept:
    """Answer of `sweep`."""
    run_id, now, braked, *flat = (text.decode() for text in out)
    expired = tuple(
        Expired(
            job=JobId(int(flat[i])),
            epoch=int(flat[i + 1]),
            node=NodeId(flat[i + 2]),
            state=NodeHealth(flat[i + 3]),
        )
        for i in range(0, len(flat), 4)
    )
    return Swept(run_id=run_id, now_ms=int(now), expired=expired, braked=int(braked))


def changes(out: Sequence[Any], after: int) -> Changes:
    """Answer of `changes`; a task that an operator has deleted is passed over."""
    cursor = after
    tasks = []
    for job, seq, f in out[1:]:
        cursor = int(seq)
        if f[0] is not None and f[1] is not None:
            tasks.append(task_view(int(job), f))
    return Changes(now_ms=int(out[0]), cursor=cursor, tasks=tuple(tasks))


def task_view(job: int, f: Sequence[bytes | None]) -> TaskView:
    """One task of `changes`, in the order in which the script reads its fields."""
    number = [int(float(x or 0)) for x in (f[0], *f[3:6], *f[8:11])]
    epoch, started, seen, expired, resumed, done, freed = number
    return TaskView(
        job=JobId(job),
        epoch=epoch,
        status=TaskStatus(_text(f[1])),
        node=NodeId(_text(f[2])),
        started_ms=started,
        seen_ms=seen,
        expired_ms=expired,
        expired_state=NodeHealth(_text(f[6]) or NodeHealth.STABLE.value),
        returned=bool(f[7]),
        resumed_ms=resumed,
        done_ms=done,
        freed_ms=freed,
        detail=_text(f[11]),
        result=f[12] or b"",
    )


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


def report_fields(report: NodeReport) -> list[str | bytes | int]:
    """A node's own fields as its hash keeps them: names and values in turn."""
    fields: dict[str, str | bytes | int] = {
        "gpus": report.gpus,
        "good": int(report.good),
        "gpu_free_vram_mb": report.free_vram_mib,
        "gpu_utilization": report.utilisation,
        "cores": report.cores,
        "memory_mib": report.memory_mib,
        "reserve_mib": report.reserve_mib,
        "version": report.version,
        "address": report.address,
    }
    return [x for pair in fields.items() for x in pair]


def mark_fields(mark: NodeMark) -> list[str | int]:
    """A verdict as the node's hash keeps it."""
    fields: dict[str, str | int] = {
        "status": mark.state.value,
        "gpu_status": "READY" if mark.ready else "UNAVAILABLE",
        "consecutive_failures": mark.failures,
        "gpu_consecutive_ready": mark.good_samples,
        "penalty": mark.penalty,
        "penalty_until": mark.penalty_until_ms,
        "dead": int(mark.dead),
    }
    return [x for pair in fields.items() for x in pair]


def node_views(now_ms: int, hashes: Mapping[str, Mapping[bytes, bytes]]) -> NodeViews:
    """All nodes from their hashes."""
    return NodeViews(
        now_ms=now_ms, nodes=tuple(node_view(name, f) for name, f in hashes.items() if f)
    )


def node_view(name: str, fields: Mapping[bytes, bytes]) -> NodeView:
    """One node from its hash; fields that are missing have never been written."""
    text = {k.decode(): _text(v) for k, v in fields.items()}

    def number(key: str) -> int:
        return int(float(text.get(key) or 0))

    report = NodeReport(
        node=NodeId(name),
        gpus=fields.get(b"gpus", b"[]"),
        sample=number("sample"),
        good=text.get("good") == "1",
        free_vram_mib=number("gpu_free_vram_mb"),
        utilisation=number("gpu_utilization"),
        cores=number("cores"),
        memory_mib=number("memory_mib"),
        reserve_mib=number("reserve_mib"),
        version=text.get("version", ""),
        address=text.get("address", ""),
    )
    return NodeView(
        report=report,
        last_seen_ms=number("last_seen"),
        last_sample_ms=number("last_gpu_check"),
        bye=Bye(text["bye"]) if text.get("bye") else None,
        bye_ms=number("bye_at"),
        state=NodeHealth(text["status"]) if text.get("status") else None,
        ready=text.get("gpu_status") == "READY",
        penalty=number("penalty"),
        penalty_until_ms=number("penalty_until"),
    )


def faults(info: Mapping[str, Any]) -> list[str]:
    """What is wrong with how a Redis is run, from its own report."""
    found = []
    if not info.get("aof_enabled"):
        found.append(
            "Redis runs without appendonly: a power cut would forget leases and queued tasks. "
            "Set `appendonly yes`."
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(
            f"Redis may throw keys away when memory is short (maxmemory-policy {policy}). "
            "Set `maxmemory-policy noeviction`."
        )
    if str(info.get("redis_mode", "standalone")) == "cluster":
        found.append("Redis is a cluster: use a key prefix in braces, like `{dure}:`.")
    return found
