"""Cost of the tracking SDK beside MLflow's own monitor, and how long a stop takes without a server.

A real MLflow server on SQLite; each side samples once a second for the same time in a process of
its own. CPU is process time, so a busy machine changes it little. Needs .venv-track (`make test`
makes it) and moves there by itself. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TRACK = ROOT / ".venv-track" / "bin" / "python"
IMPORT = """
import time
t = time.process_time()
import dure_sdk.tracking
print((time.process_time() - t) * 1000)
"""
# What a training program does; the clock starts after imports and the first sample.
CHILD = """
import json, os, sys, time
import mlflow
which, uri, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
mlflow.set_tracking_uri(uri)
from dure_sdk import tracking
enable_ms = 0.0
if which == "stock":
    mlflow.system_metrics.set_system_metrics_sampling_interval(1)
    run = mlflow.start_run(log_system_metrics=True)
elif which == "ours":
    run = tracking.start_run()
    begun = time.perf_counter()
    tracking.enable_system_metrics(interval=1)
    enable_ms = (time.perf_counter() - begun) * 1000
else:
    run = tracking.start_run()
time.sleep(2)
print("go", flush=True)
begun = time.process_time()
time.sleep(seconds)
cpu_s = time.process_time() - begun
print(json.dumps([cpu_s, enable_ms, run.info.run_id]), flush=True)
begun = time.monotonic()
sys.stdin.readline()
begun = time.monotonic()
tracking.end_run() if which == "ours" else mlflow.end_run()
print(json.dumps(time.monotonic() - begun), flush=True)
os._exit(0)
"""
# The training thread: a loop that looks at the clock, while samples are taken ten times a second
# and the server is silent. Its longest pause is what it was kept from running.
SPIN = """
import json, os, sys, time
import mlflow
which, uri, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
mlflow.set_tracking_uri(uri)
from dure_sdk import tracking
run = tracking.start_run()
if which == "ours":
    tracking.enable_system_metrics(interval=0.1)
time.sleep(2)
print("go", flush=True)
sys.stdin.readline()
end = before = time.perf_counter()
end += seconds
pauses = []
while before < end:
    now = time.perf_counter()
    if now - before > 0.001:
        pauses.append(now - before)
    before = now
pauses.sort()
p99 = pauses[int(len(pauses) * 0.99)] if pauses else 0
print(json.dumps([p99 * 1000, max(pauses, default=0) * 1000]), flush=True)
os._exit(0)
"""


def import_cpu_ms() -> float:
    """The best of ten: the package's own cost."""
    ask = [sys.executable, "-I", "-c", IMPORT]
    return min(float(subprocess.check_output(ask)) for _ in range(10))


def server_cpu_s(pid: int) -> float:
    """CPU of the server and all its workers so far."""
    import psutil

    tree = [psutil.Process(pid)]
    tree += tree[0].children(recursive=True)
    return sum(sum(p.cpu_times()[:2]) for p in tree if p.is_running())


def side(which: str, uri: str, seconds: float, pid: int) -> dict[str, float]:
    """One program's CPU, and the server's while it ran."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, which, uri, str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin and child.stdout
    while child.stdout.readline() != "go\n":
        pass
    before = server_cpu_s(pid)
    cpu_s, enable_ms, run_id = json.loads(child.stdout.readline())
    server_s = server_cpu_s(pid) - before
    child.stdin.write("\n")
    child.stdin.close()
    stop_s = json.loads(child.stdout.readlines()[-1])
    child.wait()
    return {
        "cpu_s": cpu_s,
        "server_s": server_s,
        "enable_ms": enable_ms,
        "stop_s": stop_s,
        "points": points(uri, run_id),
    }


def points(uri: str, run_id: str) -> int:
    """How many points of one series the run has: both sides must have worked."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    keys = [k for k in client.get_run(run_id).data.metrics if "memory_usage_megabytes" in k]
    return len(client.get_metric_history(run_id, keys[0])) if keys else 0


def stop_s(mode: str, port: int) -> float:
    """Seconds of `end_run` when the server has gone into `mode`."""
    from tests.sdk.servers import Door

    door = Door(port)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "ours", door.uri, "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdin and child.stdout
    while child.stdout.readline() != "go\n":
        pass
    child.stdout.readline()
    door.turn(mode)
    child.stdin.write("\n")
    child.stdin.close()
    took_s = float(json.loads(child.stdout.readlines()[-1]))
    child.wait()
    door.close()
    return took_s


def pauses_ms(which: str, port: int, seconds: float) -> list[float]:
    """p99 and longest of the pauses over 1 ms of a training thread beside a silent server."""
    from tests.sdk.servers import Door

    door = Door(port)
    child = subprocess.Popen(
        [sys.executable, "-c", SPIN, which, door.uri, str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdin and child.stdout
    while child.stdout.readline() != "go\n":
        pass
    door.turn("silent")
    child.stdin.write("\n")
    child.stdin.close()
    got: list[float] = json.loads(child.stdout.readlines()[-1])
    child.wait()
    door.close()
    return got


def main() -> None:
    """Measure and print."""
    if importlib.util.find_spec("mlflow") is None:
        if not TRACK.exists():
            sys.exit("bench/sdk.py needs .venv-track: make .venv-track/.made")
        os.execv(TRACK, [str(TRACK), *sys.argv])
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30)
    seconds = parser.parse_args().seconds
    from tests.sdk.servers import MlflowServer

    server = MlflowServer()
    try:
        server.wait()
        nothing = side("nothing", server.uri, seconds, server.process.pid)
        stock = side("stock", server.uri, seconds, server.process.pid)
        ours = side("ours", server.uri, seconds, server.process.pid)
        for name, got in (("nothing", nothing), ("stock", stock), ("ours", ours)):
            print(name, json.dumps(got))
        alone = pauses_ms("nothing", server.port, 10)
        beside = pauses_ms("ours", server.port, 10)
        stops = {mode: stop_s(mode, server.port) for mode in ("refused", "busy", "silent")}
    finally:
        server.close()
    idle = nothing["server_s"]
    metrics = {
        "import_cpu_ms": round(import_cpu_ms(), 2),
        "cpu_ratio_to_stock": round(ours["cpu_s"] / stock["cpu_s"], 3),
        "server_cpu_ratio_to_stock": round(
            max(ours["server_s"] - idle, 0) / max(stock["server_s"] - idle, 0.01), 3
        ),
        "cpu_share_at_1s_percentage": round(ours["cpu_s"] / seconds * 100, 3),
        "enable_ms": round(ours["enable_ms"], 1),
        "training_pause_p99_ms": round(beside[0], 1),
        "training_pause_max_ms": round(beside[1], 1),
        "training_pause_max_ms_without": round(alone[1], 1),
        "points_ours": ours["points"],
        "points_stock": stock["points"],
        "stop_refused_server_s": round(stops["refused"], 2),
        "stop_busy_server_s": round(stops["busy"], 2),
        "stop_silent_server_s": round(stops["silent"], 2),
    }
    print(json.dumps({"name": "sdk", "metrics": metrics}))


if __name__ == "__main__":
    main()
