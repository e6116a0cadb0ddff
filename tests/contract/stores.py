"""Stores under test, and values with every field filled in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from dure.adapters.store.memory import MemoryStore
from dure.adapters.store.sql import SqlStore
from dure.core.events import Event, EventName
from dure.core.model import (
    Attempt,
    Evidence,
    Gpu,
    Job,
    JobRequest,
    JobState,
    JobView,
    Lab,
    Lease,
    LedgerEntry,
    LedgerKind,
    Limits,
    Node,
    NodeHealth,
    Outcome,
    Phase,
    PlacementId,
    PreStopSignal,
    Reservation,
    Retry,
    RetryOn,
    Role,
    Segment,
    Shape,
    Skip,
    Tier,
    User,
)
from dure.ports import Reads, Replay, Store, Token
from tests import postgres

KINDS = ("memory", "sqlite", "postgres")
SQL_KINDS = ("sqlite", "postgres")


class Home:
    """Where one test's store lives: it can be opened again, and twice at a time."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self._memory = MemoryStore()
        self._open: list[Store] = []

    def open(self) -> Store:
        """The store, as one more server would open it."""
        store: Store = self._memory if self.kind == "memory" else SqlStore(self.url)
        self._open.append(store)
        return store

    def close(self) -> None:
        """Close whatever the test has opened."""
        for store in self._open:
            store.close()


@contextmanager
def home(kind: str, folder: Path, *, empty: bool = False) -> Iterator[Home]:
    """A place of its own for one test; `empty`: before any schema."""
    with _url(kind, folder, empty=empty) as url:
        made = Home(kind, url)
        try:
            yield made
        finally:
            made.close()


@contextmanager
def _url(kind: str, folder: Path, *, empty: bool) -> Iterator[str]:
    if kind == "memory":
        yield ""
    elif kind == "sqlite":
        if not empty:
            (folder / "dure.db").write_bytes(_sqlite_template())
        yield f"sqlite:///{folder / 'dure.db'}"
    else:
        server = _cluster()
        name = server.database() if empty else server.database(_postgres_template())
        yield server.url(name)
        server.drop(name)


def _cluster() -> postgres.Cluster:
    if "postgres" in os.environ.get("DURE_TEST_WITHOUT", "").split(","):
        pytest.skip("not tested with PostgreSQL: DURE_TEST_WITHOUT=postgres")
    if postgres.binaries() is None:
        pytest.fail(postgres.MISSING, pytrace=False)
    return postgres.cluster()


@cache
def _sqlite_template() -> bytes:
    """Migrated once: alembic takes longer than most tests."""
    with TemporaryDirectory(prefix="dure-store-") as folder:
        file = Path(folder) / "template.db"
        SqlStore(f"sqlite:///{file}").close()
        return file.read_bytes()


@cache
def _postgres_template() -> str:
    server = postgres.cluster()
    name = server.database()
    SqlStore(server.url(name)).close()
    return name


# -- values --------------------------------------------------------------------------

PLACE = PlacementId(node="gpu-01", tier="RTX4090")
SKIP = Skip(placement=PLACE, until_ms=99)
RESERVATION = Reservation(placement=PLACE, count=2, since_ms=1_700_000_000_007, mtflops=82_600)
SEGMENT = Segment(placement=PLACE, gpus=2, from_ms=5, to_ms=9, mtflops=82_601)
LIMITS = Limits(slots=3, num_gpus=4, waiting=5, max_time_limit_s=6)
AT_MS = 1_700_000_000_000


def job(job_id: int, state: JobState = JobState.GLOBAL_QUEUE_WAIT, **kw: object) -> Job:
    """A short job."""
    name = kw.pop("name", "train")
    lab = kw.pop("lab", "BCG")
    kw.setdefault("user", "ann")
    kw.setdefault("submitted_ms", AT_MS + job_id)
    kw.setdefault("request", JobRequest(name=name, lab=lab, command=("true",)))
    return Job(id=job_id, state=state, **kw)


def full_request() -> JobRequest:
    return JobRequest(
        name="긴 이름 \N{SNOWMAN} \\ \" '",
        lab="BCG",
        command=("python", "train.py", "--lr=1e-3", "\n\t"),
        env={"A": "1", "B": "가"},
        workspace="ws",
        num_gpus=2,
        tiers=("RTX4090", "RTX5090"),
        min_vram_gb=11.5,
        node="gpu-01",
        time_limit_s=3600,
        not_before_ms=7,
        retry=Retry(max=3, on=RetryOn.ERROR),
        oom_escalate=False,
        idempotent=True,
        pre_stop_signal=PreStopSignal(signal="USR1", before_s=30),
        data=("cifar",),
        secrets=("hf",),
        track=True,
        notify=("mail",),
        output="out",
        workdir="/home/ann",
        labels={"k": "v"},
    )


def full_job(job_id: int, state: JobState = JobState.NODE_WAIT) -> Job:
    return Job(
        id=job_id,
        user="ann",
        request=full_request(),
        state=state,
        submitted_ms=AT_MS,
        version=7,
        position=0.1 + 0.2,
        held=True,
        entered_ms=11,
        eligible_ms=12,
        waiting_for="RETRY_BACKOFF",
        epoch=4,
        starts=5,
        retries=6,
        refusals=7,
        node_lost_count=8,
        node_wait_count=9,
        node_wait_since_ms=10,
        floor_gb=23.9,
        host_mib=64_001,
        skips=(SKIP,),
        reservation=RESERVATION,
        segments=(SEGMENT, SEGMENT),
        next_segment=3,
        lost_reservation=True,
        fit_lost=True,
        cancel_ms=13,
        started_ms=14,
        ended_ms=15,
        exit_code=-9,
        error="OOM_NO_LARGER_TIER",
        error_params={"tier": "RTX4090", "gb": 24.0, "n": 2},
        array_id=16,
        array_index=1,
        after=(1, 2),
    )


def attempt(job_id: int, epoch: int = 1, gpus: tuple[int, ...] = (0,), **kw: object) -> Attempt:
    """A short attempt, on a node of its own unless told otherwise."""
    node = kw.pop("node", f"node-{job_id}")
    return Attempt(
        job=job_id,
        epoch=epoch,
        lab="BCG",
        placement=PlacementId(node=node, tier="RTX4090"),
        gpus=gpus,
        mtflops=82_600,
        vram_gb=24,
        simulated=False,
        dispatched_ms=AT_MS,
        **kw,
    )


def full_attempt(job_id: int, epoch: int) -> Attempt:
    return Attempt(
        job=job_id,
        epoch=epoch,
        lab="BCG",
        placement=PLACE,
        gpus=(0, 3),
        mtflops=82_600,
        vram_gb=23.5,
        simulated=True,
        dispatched_ms=AT_MS,
        start_no=2,
        started_ms=AT_MS + 1,
        last_seen_ms=AT_MS + 2,
        ended_ms=AT_MS + 3,
        freed_ms=AT_MS + 4,
        outcome=Outcome.GPU_OOM,
        evidence=Evidence(
            exit_code=1,
            signal=9,
            oom_kill=2,
            scheduler_state="OUT_OF_MEMORY",
            exception="torch.OutOfMemoryError",
            stderr_tail="CUDA \x00 out \u20ac",
            timed_out=True,
            vram_limited=True,
            term_ms=AT_MS + 4,
            kill_ms=AT_MS + 5,
            full=("output", "log"),
        ),
        segments=(SEGMENT,),
        booked_to_ms=AT_MS + 6,
        run_segments=3,
        stop="cancel",
        stop_ms=AT_MS + 5,
        detail="why",
    )


def line(job_id: int, epoch: int = 1, segment: int = 0, **kw: object) -> LedgerEntry:
    """A ledger line."""
    kw = {
        "kind": LedgerKind.RUN,
        "lab": "BCG",
        "user": "ann",
        "gpus": 2,
        "from_ms": AT_MS,
        "to_ms": AT_MS + 5,
        "mtflops": 82_600,
        "booked_ms": AT_MS + 6,
        **kw,
    }
    return LedgerEntry(job=job_id, epoch=epoch, segment=segment, placement=PLACE, **kw)


def full_lab(name: str = "BCG", usage_micro: float = 0.1 + 0.2) -> Lab:
    return Lab(
        name=name, title="뇌", weight=1.5, usage_micro=usage_micro, as_of_ms=3, limits=LIMITS
    )


def full_user(name: str = "ann") -> User:
    return User(name=name, lab="BCG", role=Role.ADMIN, active=False, limits=LIMITS, unix_uid=20_001)


def full_tier(name: str = "RTX4090") -> Tier:
    return Tier(name=name, vram_gb=23.99, mtflops=82_600, sort_order=5, max_gpus=2, active=False)


def full_node(name: str = "gpu-01") -> Node:
    gpu = Gpu(
        index=1,
        tier="RTX4090",
        uuid="GPU-1",
        healthy=False,
        foreign=True,
        retired=True,
        simulated=True,
    )
    return Node(
        name=name,
        backend="local",
        gpus=(gpu,),
        health=NodeHealth.OFFLINE,
        drained=True,
        drain_reason="fan",
        ready=False,
        penalty_until_ms=1,
        last_seen_ms=2,
        cores=3,
        memory_mib=4,
        reserve_mib=5,
    )


def full_token(digest: str = "ab12") -> Token:
    return Token(
        digest=digest, user="ann", label="laptop", created_ms=1, expires_ms=2, last_used_ms=3
    )


def full_replay(key: str = "k", created_ms: int = 1) -> Replay:
    return Replay(
        user="ann",
        key=key,
        fingerprint="f",
        created_ms=created_ms,
        response=bytes(range(256)),
    )


def event(n: int = 0, job_id: int | None = None) -> Event:
    """A short event."""
    return Event(name=EventName.JOB_SUBMITTED, at_ms=AT_MS, job=job_id, params={"n": n})


def full_event(job_id: int = 1) -> Event:
    shape = Shape(num_gpus=2, tiers=("T",), node="gpu-01", floor_gb=24.0, host_mib=5, skips=(SKIP,))
    view = JobView(
        id=job_id,
        lab="BCG",
        user="ann",
        state=JobState.NODE_WAIT,
        shape=shape,
        entered_ms=1,
        eligible_ms=2,
        epoch=3,
        reservation=RESERVATION,
    )
    return Event(
        name=EventName.LAB_CHARGED,
        at_ms=AT_MS,
        job=job_id,
        epoch=2,
        lab_id="BCG",
        user="ann",
        node_id="gpu-01",
        tier_id="RTX4090",
        actor="admin",
        params={"cost": 10**24, "share": 0.5, "why": "한글", "one": 1.0},
        view=view,
        taken=Lease(job=job_id, epoch=2, placement=PLACE, gpus=(0, 1)),
        freed=1,
        lab=full_lab(),
        node=full_node(),
        tier=full_tier(),
        phase=Phase.DRAINING,
    )


def left_at_default(value: msgspec.Struct) -> list[str]:
    """Fields that a value which is called full has not filled in."""
    fields = msgspec.structs.fields(type(value))
    return [f.name for f in fields if not f.required and getattr(value, f.name) == f.default]


def everything(
    reads: Reads, jobs: int, users: tuple[str, ...] = ("ann", "bob")
) -> dict[str, object]:
    """The answers to all questions, to compare two stores or two moments."""
    ids = range(1, jobs + 1)
    return {
        "jobs": reads.jobs(ids),
        "each job": [reads.job(i) for i in ids],
        "all_jobs": list(reads.all_jobs()),
        "live_jobs": list(reads.live_jobs()),
        "personal": [reads.personal_queue(u) for u in users],
        "personal users": reads.users_with_personal_jobs(),
        "slots": [reads.slots_used(u) for u in users],
        "waiting": [reads.waiting_count(u) for u in users],
        "attempts": [reads.attempts(i) for i in ids],
        "each attempt": [reads.attempt(i, e) for i in ids for e in (1, 2)],
        "open": reads.open_attempts(),
        "all_attempts": list(reads.all_attempts()),
        "ledger": reads.ledger(),
        "labs": reads.labs(),
        "users": reads.users(),
        "tiers": reads.tiers(),
        "nodes": reads.nodes(),
        "tokens": [reads.tokens(u) for u in users],
        "replays": [reads.replay(u, k) for u in users for k in ("a", "b")],
        "phase": reads.phase(),
        "events": reads.events(),
        "last": reads.last_event_id(),
    }
