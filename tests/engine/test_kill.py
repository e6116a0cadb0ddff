"""kill -9 at every step of submit, dispatch, end, charge and cancel (fault points).

A fork per death: the child runs the real engine on SQLite with simulated machines whose
journal survives it, and dies at the n-th passing of one point. Then a fresh engine finds
everything as it was promised: I1 to I10 hold, running jobs were not started twice, nothing
is charged twice or not at all.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import tempfile
import traceback
from functools import cache
from pathlib import Path

import pytest

from dure.adapters.clock import ManualClock
from dure.adapters.compute.simulated import SimRun, SimulatedBackend
from dure.adapters.store.sql import SqlStore
from dure.core.errors import DureError
from dure.core.invariants import World, check_world
from dure.core.model import TERMINAL, Evidence, JobRequest, Lab, Role, User
from dure.core.policy import Policy
from dure.engine import commands
from dure.engine.controller import Controller
from dure.engine.engine import Engine
from dure.engine.faultpoints import POINTS, install
from tests.core.build import R3080TI, R4090, node
from tests.story import CUDA_OOM

NODES = [node("n1", (R4090, 2)), node("n2", (R3080TI, 2))]
POLICY = Policy(slots_per_user=3)
START_MS = 1_800_000_000_000
USERS = [User(name="a", lab="A"), User(name="b", lab="B")]
ROOT = User(name="root", lab="A", role=Role.ADMIN)
DEATHS = 200
# Every step of submit, dispatch, end, charge and cancel; often ones may die later.
MOMENTS = {
    **{
        f"{case}.{side}_commit": (1, 1, 2, 4)
        for case in ("submit",)
        for side in ("before", "after")
    },
    **{f"{case}.{side}_commit": (1, 2) for case in ("cancel",) for side in ("before", "after")},
    **{
        f"{case}.{side}_commit": (1, 1)
        for case in ("hold", "release")
        for side in ("before", "after")
    },
    **{
        f"{case}.{side}_commit": (1, 2, 3, 5, 8)
        for case in ("dispatch", "record")
        for side in ("before", "after")
    },
    "dispatch.after_launch": (1, 2, 3, 5, 8),
    "cancel.after_stop": (1, 1),
}
assert set(MOMENTS) <= set(POINTS)


def script(order) -> SimRun:
    """A behaviour that depends on the order alone, so that it survives the death."""
    rng = random.Random(f"{order.key.job}.{order.key.epoch}")
    roll = rng.random()
    run_ms = rng.randrange(500, 9000)
    if roll < 0.10:
        return SimRun(refuse="no room")
    if roll < 0.25:
        return SimRun(run_ms=run_ms, evidence=CUDA_OOM)
    if roll < 0.35:
        return SimRun(run_ms=run_ms, evidence=Evidence(exit_code=3), linger_ms=700)
    return SimRun(start_ms=rng.randrange(0, 300), run_ms=run_ms, save_ms=rng.randrange(0, 4000))


class Site:
    """Engine, store and machines on one folder; opened again after a death."""

    def __init__(self, folder: Path, now_ms: int = 0) -> None:
        self.store = SqlStore(f"sqlite:///{folder / 'dure.db'}")
        with self.store.read() as tx:
            newest = tx.events(after=max(0, tx.last_event_id() - 1), limit=1)
        self.clock = ManualClock(max([START_MS, now_ms, *(e.at_ms for e in newest)]))
        self.backend = SimulatedBackend(self.clock, NODES, script, folder / "machines.journal")
        self.engine = Engine(self.store, self.clock, POLICY, {"simulated": self.backend})
        self.controller = Controller(self.engine, sweep_s=5)

    def close(self) -> None:
        self.backend.close()
        self.store.close()


def found(folder: Path) -> None:
    """Tiers, nodes, labs, users: the same for every run, so made once and copied."""
    shutil.copy(template(), folder / "dure.db")


@cache
def template() -> Path:
    made = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    _found(made)
    return made / "dure.db"


def _found(folder: Path) -> None:
    store = SqlStore(f"sqlite:///{folder / 'dure.db'}")
    with store.write() as tx:
        for tier in (R4090, R3080TI):
            tx.put_tier(tier)
        for n in NODES:
            tx.put_node(n)
        for lab in ("A", "B"):
            tx.put_lab(Lab(name=lab))
        for user in (*USERS, ROOT):
            tx.put_user(user)
    store.close()


def live(folder: Path, seed: int, told) -> None:
    """Submit, cancel, hold and let time pass; tell what the user was told."""
    site = Site(folder)
    rng = random.Random(seed)
    ids: list[int] = []
    for _ in range(14):
        roll = rng.random()
        try:
            if roll < 0.6 or not ids:
                user = rng.choice(USERS)
                request = JobRequest(
                    name="x", lab=user.lab, command=("t",), num_gpus=rng.choice([1, 1, 2])
                )
                job = commands.submit(site.engine, user, [request], key=f"k{len(ids)}").jobs[0]
                ids.append(job.id)
                told(f"accepted {job.id}")
            elif roll < 0.75:
                job = commands.cancel(site.engine, ROOT, rng.choice(ids))
                told(f"cancelled {job.id}")
            elif roll < 0.85:
                commands.hold(site.engine, ROOT, rng.choice(ids))
            else:
                commands.release(site.engine, ROOT, rng.choice(ids))
        except DureError:
            pass
        site.controller.sweep()
        site.clock.advance(rng.choice([0.1, 1, 3]))
        site.controller.turn()
        told(f"clock {site.clock.now_ms()}")
    site.close()


def die_at(point: str, nth: int) -> None:
    left = nth

    def hook(reached: str) -> None:
        nonlocal left
        if reached == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    install(hook)


def run_and_die(folder: Path, seed: int, point: str, nth: int) -> tuple[bool, list[str]]:
    """Whether the child died at the point, and the lines it had told before."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            die_at(point, nth)
            live(folder, seed, lambda line: os.write(writer, f"{line}\n".encode()))
            code = 0
        except BaseException:  # noqa: BLE001 - the parent prints it
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or os.WEXITSTATUS(status) == 0, "\n".join(lines)
    return killed, lines


def check(site: Site) -> None:
    with site.store.read() as tx:
        world = World(
            jobs=tuple(tx.all_jobs()),
            attempts=tuple(tx.all_attempts()),
            ledger=tuple(tx.ledger()),
            labs=tuple(tx.labs()),
            now_ms=site.clock.now_ms(),
            half_life_ms=POLICY.half_life_ms,
        )
    limits = {u.name: POLICY.slots_per_user for u in USERS}
    assert check_world(world, limits) == []


def find_again(folder: Path, lines: list[str]) -> None:
    """A fresh engine on what is left keeps every promise and comes to an end."""
    clocks = [int(x.split()[1]) for x in lines if x.startswith("clock")]
    site = Site(folder, max(clocks, default=0))
    running_before = {lease.key for lease in site.backend.leases()}
    check(site)
    site.controller.sweep()
    check(site)
    started_again = {o.key for o in site.backend.launches} & running_before
    assert not started_again, f"started twice: {started_again}"
    with site.store.read() as tx:
        for line in lines:
            word, number = line.split()
            job = tx.job(int(number)) if word != "clock" else None
            assert word == "clock" or job is not None, f"{line} was lost"
            if word == "cancelled":
                assert job.state.value in ("CANCELLING", "CANCELLED"), job
    with site.store.read() as tx:
        held = [j for j in tx.live_jobs() if j.held]
    for job in held:
        commands.release(site.engine, ROOT, job.id)
    for _ in range(400):
        site.controller.sweep()
        with site.store.read() as tx:
            if not list(tx.live_jobs()) and not tx.open_attempts():
                break
        site.clock.advance(150)
    with site.store.read() as tx:
        left = [(j.id, j.state.value) for j in tx.live_jobs()]
        jobs = list(tx.all_jobs())
    assert not left, left
    assert all(j.state in TERMINAL for j in jobs)
    check(site)
    site.close()


@pytest.mark.parametrize("part", range(4))
def test_kill_9_at_every_step_breaks_no_promise(part: int) -> None:
    """200 deaths in all, spread over all points, seeds and moments."""
    deaths = 0
    attempt = 0
    while deaths < DEATHS // 4:
        attempt += 1
        assert attempt < 3 * DEATHS, "the points are not reached often enough"
        rng = random.Random(f"{part}.{attempt}")
        point = list(MOMENTS)[(attempt * 4 + part) % len(MOMENTS)]
        nth = rng.choice(MOMENTS[point])
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found(folder)
            killed, lines = run_and_die(folder, rng.randrange(1 << 30), point, nth)
            try:
                find_again(folder, lines)
            except BaseException as error:
                error.add_note(f"death: part {part} attempt {attempt} at {point} #{nth}")
                raise
        deaths += killed


def test_the_points_that_matter_are_really_reached() -> None:
    """A point that no run passes would make the test above say nothing."""
    reached: set[str] = set()
    install(reached.add)
    try:
        for seed in range(6):
            with tempfile.TemporaryDirectory() as name:
                found(Path(name))
                live(Path(name), seed, lambda _: None)
    finally:
        install(None)
    assert set(MOMENTS) <= reached
