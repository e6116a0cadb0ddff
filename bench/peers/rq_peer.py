"""No-op tasks through one RQ SimpleWorker (no fork): `rq_peer.py REDIS_URL`."""

import logging
import sys
import time

from redis import Redis
from rq import Queue, SimpleWorker

TASKS = 600
connection = Redis.from_url(sys.argv[1])
queue = Queue(connection=connection)
for _ in range(TASKS):
    queue.enqueue(time.monotonic, result_ttl=0)
logging.disable(logging.CRITICAL)
worker = SimpleWorker([queue], connection=connection)
begun = time.perf_counter()
worker.work(burst=True)
took = time.perf_counter() - begun
if len(queue):
    sys.exit("not all tasks ran")
print(TASKS / took)
