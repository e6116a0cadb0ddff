"""Run by test_launchers in a network namespace: MLflow, then Ray, then what MLflow holds."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.sdk.servers import MlflowServer


def loopback_up() -> None:
    """A new network namespace has its loopback down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        flags = struct.unpack("16sh", fcntl.ioctl(s, 0x8913, struct.pack("16sh", b"lo", 0)))[1]
        if not flags & 1:
            fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", flags | 1))


def main() -> None:
    loopback_up()
    python, script = sys.argv[1:3]
    server = MlflowServer()
    try:
        env = {**os.environ, "MLFLOW_TRACKING_URI": server.uri, "RAY_AUTH_MODE": "disabled"}
        env |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
        server.wait()
        done = subprocess.run(
            [python, script], env=env, stdout=sys.stderr, timeout=200, check=False
        )
        if done.returncode:
            sys.exit(done.returncode)
        from mlflow import MlflowClient

        client = MlflowClient(server.uri)
        where = client.get_experiment_by_name("dure-examples").experiment_id
        run = client.search_runs([where], max_results=1)[0]
        series = [k for k in run.data.metrics if k.startswith("system/")]
        print(json.dumps({"series": series, "tags": run.data.tags, "status": run.info.status}))
    finally:
        server.close()


if __name__ == "__main__":
    main()
