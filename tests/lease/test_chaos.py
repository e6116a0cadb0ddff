"""Nothing is lost and nothing is committed twice, whatever dies when."""

from __future__ import annotations

import random
import time

import pytest

from dure.adapters.clock import SystemClock
from dure.adapters.lease.memory import MemoryLeaseQueue
from dure.adapters.lease.redis import RedisLeaseQueue
from tests.lease.chaos import Chaos
from tests.lease.servers import RedisServer

TTL_S = 0.4
TASKS = 1500
LIMIT_S = 18


def epoch(lease: str) -> int:
    return int(lease.partition(":")[0])


def check(chaos: Chaos) -> None:
    print(dict(chaos.count))
    assert chaos.wrong == []
    assert len(chaos.results) == chaos.tasks, f"lost: {chaos.tasks - len(chaos.results)}"
    superseded = 0
    for job, leases in chaos.commits.items():
        recorded = chaos.results[job].decode()
        assert recorded in leases
        # Accepted in the instant in which the store issued the next epoch: never recorded.
        others = leases - {recorded}
        assert all(epoch(lease) < epoch(recorded) for lease in others), leases
        superseded += len(others)
    assert superseded <= chaos.tasks // 50
    assert chaos.count["DIFFERS"] == 0
    # Each kind of trouble has happened, or the test has shown nothing.
    for what, least in {
        "crash": 50,
        "frozen": 150,
        "re-delivered": 100,
        "beat RESUMED": 34,
        "beat LOST": 5,
        "STALE": 5,
        "lost NODE_WAIT": 50,
        "lost FAILED": 20,
    }.items():
        assert chaos.count[what] >= least, (what, dict(chaos.count))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_chaos_in_memory(seed):
    queue = MemoryLeaseQueue(SystemClock(), ttl_s=TTL_S)
    chaos = Chaos(queue, seed, TASKS, ttl_s=TTL_S)

    def restarts() -> None:
        chance = random.Random(seed)
        for _ in range(2):
            chaos.sleep(chance.uniform(0.5, 1.0))
            queue.restart()

    chaos.disturb = [restarts]
    chaos.run(LIMIT_S)
    check(chaos)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_chaos_over_redis_that_is_killed(seed, tmp_path):
    server = RedisServer(tmp_path)
    queue = RedisLeaseQueue(server.url, ttl_s=TTL_S, timeout_s=2)
    chaos = Chaos(queue, seed, TASKS, ttl_s=TTL_S)

    def restarts() -> None:
        chance = random.Random(seed)
        for _ in range(2):
            chaos.sleep(chance.uniform(0.7, 1.4))
            server.crash()
            time.sleep(chance.uniform(0.0, TTL_S * 1.5))
            server.start()

    chaos.disturb = [restarts]
    try:
        chaos.run(LIMIT_S)
        check(chaos)
        assert chaos.count["agent away"] + chaos.count["control away"] > 0
    finally:
        queue.close()
        server.close()
