"""`make up` and `make down`: a server in the background, with its address and first token."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DURE = Path(sys.executable).parent / "dure"

CONFIG = """\
# Written by `make up`. See docs/reference/settings.md for everything that can stand here.
[server]
state_dir = "{state}"

[node]
workdirs = ["{root}"]
"""
SLOTS = """
# This machine has no NVIDIA GPU: declared slots stand in. Their VRAM is a real memory limit.
[[tiers]]
name = "SIM-L"
vram_gb = 1.0
tflops = 2.0
sort_order = 2
max_gpus = 2

[[tiers]]
name = "SIM-S"
vram_gb = 0.5
tflops = 1.0
sort_order = 1
max_gpus = 2

[[node.gpus]]
tier = "SIM-L"
count = 2
simulated = true

[[node.gpus]]
tier = "SIM-S"
count = 2
simulated = true
"""


def has_gpus() -> bool:
    """Whether the NVIDIA driver is here and knows a GPU."""
    return any(p.name[6:].isdigit() for p in Path("/dev").glob("nvidia[0-9]*"))


def write_config(state: Path) -> Path:
    """A settings file for this machine; one that is there already is kept."""
    path = state / "dure.toml"
    if not path.exists():
        state.mkdir(parents=True, exist_ok=True)
        path.write_text(CONFIG.format(state=state, root=ROOT) + ("" if has_gpus() else SLOTS))
    return path


def spawn(state: Path, *extra: str) -> subprocess.Popen[bytes]:
    """Start a server in a session of its own; its words go to server.log."""
    config = write_config(state)
    log = (state / "server.log").open("ab")
    (state / "server.url").unlink(missing_ok=True)
    return subprocess.Popen(
        [DURE, "server", "--config", config, *extra],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        cwd=ROOT,
    )


def wait_url(state: Path, server: subprocess.Popen[bytes], timeout_s: float = 30) -> str:
    """The address, once the server listens."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if (state / "server.url").exists():
            return (state / "server.url").read_text().strip()
        if server.poll() is not None:
            break
        time.sleep(0.05)
    tail = (state / "server.log").read_text()[-2000:]
    sys.exit(f"The server did not start. End of {state / 'server.log'}:\n{tail}")


def running(state: Path) -> int | None:
    """Process id of a server that runs on this state folder."""
    try:
        pid = int((state / "server.pid").read_text())
        os.kill(pid, 0)
    except (OSError, ValueError):
        return None
    return pid


def start(state: Path) -> None:
    """Start a server unless one runs, and say how to reach it."""
    if running(state) is None:
        url = wait_url(state, spawn(state))
    else:
        url = (state / "server.url").read_text().strip()
    token = (state / "admin-token").read_text().strip()
    print(f"Dure runs at {url}   (log: {state / 'server.log'})")
    print("Use it from another shell:")
    print(f"  export DURE_URL={url} DURE_TOKEN={token} DURE_CONFIG={state / 'dure.toml'}")
    print(f"  {DURE} pool")
    print(f"  {DURE} run -- python3 -c 'print(6 * 7)'")


def stop(state: Path) -> None:
    """Stop the server; jobs go on under their supervisors."""
    pid = running(state)
    if pid is None:
        print("No server runs here.")
        return
    os.kill(pid, signal.SIGTERM)
    for _ in range(400):
        # The server takes its pid file away before it has ended.
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.05)
    print("Stopped. Jobs that were running go on and are found again by the next `make up`.")


if __name__ == "__main__":
    action, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    (start if action == "start" else stop)(folder)
