"""No-op tasks through one Celery solo worker: `celery_peer.py REDIS_URL`."""

import os
import sys
import threading
import time

from celery import Celery

TASKS = 1000
app = Celery("peer", broker=sys.argv[1])
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
    broker_connection_retry_on_startup=True,
)
over = threading.Event()
times: list[float] = []


@app.task(name="nothing")
def nothing() -> None:
    """Note when."""
    times.append(time.perf_counter())
    if len(times) == TASKS:
        over.set()


for _ in range(TASKS):
    nothing.delay()
options = {"pool": "solo", "without_gossip": True, "without_mingle": True, "loglevel": "ERROR"}
worker = app.Worker(quiet=True, without_heartbeat=True, **options)
threading.Thread(target=worker.start, daemon=True).start()
if not over.wait(100):
    sys.exit("not all tasks ran")
print((TASKS - 1) / (times[-1] - times[0]), flush=True)

os._exit(0)  # a solo worker in a thread does not stop by itself
