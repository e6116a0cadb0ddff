"""Python client of the HTTP API, on the standard library's HTTP and msgspec alone.

```python
from dure.client import Client

with Client() as client:
    job = client.submit(["python", "train.py"], gpus=2, min_vram="24GB", time="4h")
    print(job.why().reason)
    for line in job.logs(follow=True):
        print(line.text)
    job.wait(timeout="6h")
```
"""

from dure.client.errors import (
    ApiError,
    BadConfig,
    BadReply,
    ClientError,
    JobCancelled,
    JobDead,
    JobEnded,
    JobFailed,
    JobTimedOut,
    OutOfMemory,
    Unreachable,
    WaitTimeout,
)
from dure.client.job import Job
from dure.client.logs import LogChunk, LogLine
from dure.client.session import Client

__all__ = [
    "ApiError",
    "BadConfig",
    "BadReply",
    "Client",
    "ClientError",
    "Job",
    "JobCancelled",
    "JobDead",
    "JobEnded",
    "JobFailed",
    "JobTimedOut",
    "LogChunk",
    "LogLine",
    "OutOfMemory",
    "Unreachable",
    "WaitTimeout",
]
