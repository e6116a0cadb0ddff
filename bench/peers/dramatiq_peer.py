"""No-op tasks through one Dramatiq worker, tuned (prefetch 512): `dramatiq_peer.py REDIS_URL`."""

import os
import sys
import time

os.environ["dramatiq_queue_prefetch"] = "512"  # noqa: SIM112 - its own name

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.worker import Worker

TASKS = 2000
broker = RedisBroker(url=sys.argv[1])
dramatiq.set_broker(broker)


@dramatiq.actor
def nothing() -> None:
    """Do nothing."""


for _ in range(TASKS):
    nothing.send()
worker = Worker(broker)
begun = time.perf_counter()
worker.start()
broker.join(nothing.queue_name)
took = time.perf_counter() - begun
worker.stop()
print(TASKS / took)
