"""How an attempt ended: the run directory's word and Slurm's, put together. Pure.

| Slurm says | the run directory has an end | it has none |
| --- | --- | --- |
| PREEMPTED | given back, also with exit 0 in the grace | given back |
| OUT_OF_MEMORY | its end, if it is a failure, as out of memory | out of memory |
| TIMEOUT | its end, as timed out | timed out |
| NODE_FAIL, BOOT_FAIL | its end, if it came by itself; else the node is lost | the node is lost |
| CANCELLED | its end; exit 0 in the grace is none | killed; never started: not launched |
| FAILED | its end | Slurm's exit code; never started: not launched |
| COMPLETED | its end | exit 0, which the batch job repeats |
| nothing any more | its end | lost |
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dure.adapters.compute.local.rundir import Exit
from dure.adapters.compute.slurm.parse import Final
from dure.core.model import Evidence, NodeHealth
from dure.ports import Exited, LeaseExpired, LeaseKey, Observation, Returned

NODE_LOST = frozenset({"NODE_FAIL", "BOOT_FAIL"})
NEVER_STARTED = Evidence(stderr_tail="stopped before it started")


def needs_word(end: Exit, *, termed: bool, stopped: bool) -> bool:
    """Whether an end may mean something else once Slurm has said why: then it waits.

    A failure may be an out-of-memory kill, and after a SIGTERM from Slurm even exit 0 may
    be a preemption. What Dure itself has stopped is what was asked.
    """
    if stopped:
        return False
    return termed or end.exit_code != 0 or end.signal is not None


def with_end(
    key: LeaseKey, at_ms: int, end: Exit, final: Final | None, *, termed: bool, stopped: bool
) -> Observation:
    """The observation of an end that the run directory tells."""
    evidence = end.evidence()
    if final is None:
        return Exited(key=key, at_ms=at_ms, evidence=evidence)
    if final.state == "PREEMPTED" and not stopped:
        return Returned(key=key, at_ms=at_ms)
    failed = end.exit_code != 0 or end.signal is not None
    forced = termed and not stopped
    if final.state in NODE_LOST and (failed or forced):
        return LeaseExpired(key=key, at_ms=at_ms, node_state=NodeHealth.OFFLINE)
    if final.state == "CANCELLED" and forced and not failed:
        evidence = Evidence(signal=15, scheduler_state="CANCELLED", stderr_tail=end.stderr_tail)
    elif final.out_of_memory and failed:
        evidence = msgspec.structs.replace(evidence, scheduler_state="OUT_OF_MEMORY")
    elif final.state == "TIMEOUT":
        evidence = msgspec.structs.replace(evidence, scheduler_state="TIMEOUT", timed_out=True)
    elif failed:
        evidence = msgspec.structs.replace(evidence, scheduler_state=final.state)
    return Exited(key=key, at_ms=at_ms, evidence=evidence)


def without_end(
    key: LeaseKey, at_ms: int, final: Final, *, started: bool, stopped: bool
) -> Iterator[Observation]:
    """What Slurm alone tells."""
    state = final.state
    evidence = Evidence(exit_code=final.exit_code, signal=final.signal, scheduler_state=state)
    if stopped and not started:
        yield Exited(key=key, at_ms=at_ms, evidence=NEVER_STARTED)
    elif state == "PREEMPTED" and not stopped:
        yield Returned(key=key, at_ms=at_ms)
    elif state in NODE_LOST:
        yield LeaseExpired(key=key, at_ms=at_ms, node_state=NodeHealth.OFFLINE)
    elif final.out_of_memory:
        killed = Evidence(signal=9, scheduler_state="OUT_OF_MEMORY")
        yield Exited(key=key, at_ms=at_ms, evidence=killed)
    elif state == "TIMEOUT":
        late = msgspec.structs.replace(evidence, exit_code=None, signal=9, timed_out=True)
        yield Exited(key=key, at_ms=at_ms, evidence=late)
    elif state in ("UNKNOWN", "REVOKED") or not started:
        # Nothing of it ran, or nobody knows: never to be taken for an end of its own.
        yield LeaseExpired(key=key, at_ms=at_ms, node_state=NodeHealth.STABLE)
    elif state in ("CANCELLED", "DEADLINE"):
        killed = msgspec.structs.replace(evidence, exit_code=None, signal=final.signal or 9)
        yield Exited(key=key, at_ms=at_ms, evidence=killed)
    else:
        yield Exited(key=key, at_ms=at_ms, evidence=evidence)
