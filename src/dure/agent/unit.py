"""systemd units of an agent, and what systemd means when it ends one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from dure.core.lease import Bye

UNIT = "dure-agent.service"
SLEEP_UNIT = "dure-agent-sleep.service"


def unit_text(command: str, user: str, *, stop_s: int = 45) -> str:
    """The service: restarted when it fails; jobs outlive it, and end with the machine."""
    return f"""[Unit]
Description=Dure agent: this machine as an edge node
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={command}
User={user}
Restart=always
RestartSec=2
# Only the agent itself is ended by a restart: its jobs have supervisors of their own.
KillMode=process
TimeoutStopSec={stop_s}
OOMScoreAdjust=-500

[Install]
WantedBy=multi-user.target
"""


def sleep_unit_text() -> str:
    """Before suspend the node says good-bye; when the machine wakes, it comes back."""
    return f"""[Unit]
Description=Dure agent says good-bye before this machine sleeps
Before=sleep.target
StopWhenUnneeded=yes

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/env systemctl stop {UNIT}
ExecStop=/usr/bin/env systemctl start --no-block {UNIT}

[Install]
WantedBy=sleep.target
"""


def install(folder: Path, command: str, user: str) -> list[Path]:
    """Write both units; whoever called enables them."""
    written = []
    for name, text in ((UNIT, unit_text(command, user)), (SLEEP_UNIT, sleep_unit_text())):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def bye_on_term(jobs: str | None = None) -> Bye:
    """What a SIGTERM means: RESTART if systemd is restarting this unit, else OFF.

    `systemctl list-jobs` names the reason; without systemd there is only one.
    """
    if jobs is None:
        jobs = _list_jobs()
    for line in jobs.splitlines():
        words = line.split()
        if len(words) >= 3 and words[1] == UNIT and words[2] == "restart":
            return Bye.RESTART
    return Bye.OFF


def _list_jobs() -> str:
    program = shutil.which("systemctl")
    if program is None or "INVOCATION_ID" not in os.environ:
        return ""
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            [program, "list-jobs", "--no-legend", "--no-pager"],
            capture_output=True,
            text=True,
            timeout=2,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
