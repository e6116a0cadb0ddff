"""On the compute node: `python -I -S -X utf8 batch.py ATTEMPT_DIR`, the body of the batch job.

Rule: standard library only, syntax of Python 3.9. Runs under the job's own account, as the
parent of the same supervisor that the local backend uses, and passes on to it what the
server asks. ATTEMPT_DIR belongs to the server, which alone can write `spec.json` and
`stop.json` there; its folder `run/` belongs to the job's account.

SIGUSR1 (from `scancel --batch --signal=USR1`) says that there is a stop order; a look every
second makes a lost signal harmless. SIGTERM comes from Slurm itself (scancel by somebody,
preemption, time limit); that it came is left behind in `run/slurm-end.json`, so that a job
which saves and ends well in Slurm's grace is not taken for one that was done.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

LOOK_S = 1.0
UNSTARTED = 125
HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs time
SUPERVISOR = os.path.join(os.path.dirname(HERE), "local", "supervisor.py")  # noqa: PTH118, PTH120


def read_json(path: str) -> Fields | None:
    """A file that is there and whole."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - as above
            value = json.load(file)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: str, value: Fields) -> None:
    """Replace a file whole; only this account may read it."""
    fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.rename(f"{path}.new", path)  # noqa: PTH104 - as above


def granted(spec: Fields) -> Fields:
    """The spec with the GPUs that Slurm chose: only here it is known which ones."""
    env = dict(spec["env"])
    for name in ("SLURM_JOB_ID", "SLURM_JOB_GPUS", "SLURM_CPUS_ON_NODE"):
        if name in os.environ:
            env[name] = os.environ[name]
    # A stand-in GPU has no driver: its job must not see a real one that has its number.
    if not spec.get("slurm_simulated"):
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    known = {name: value for name, value in spec.items() if name != "slurm_simulated"}
    return {**known, "env": env}


class Batch:
    """One attempt on this node."""

    def __init__(self) -> None:
        self.told = False
        self.termed = False
        out, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.wake = out
        signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, self.signalled)

    def signalled(self, number: int, _: object) -> None:
        """Only remember; the loop acts."""
        self.termed = self.termed or number == signal.SIGTERM

    def run(self) -> int:
        """Until the supervisor ends; the job's exit code, for Slurm's own books."""
        spec = read_json("spec.json")
        if spec is None:
            sys.stderr.write(f"dure: {os.getcwd()}/spec.json cannot be read on this node\n")  # noqa: PTH109
            return UNSTARTED
        os.chdir("run")
        if os.path.exists("lock"):  # noqa: PTH110 - as above
            sys.stderr.write("dure: this attempt has been started before; nothing to do\n")
            return UNSTARTED
        write_json("spec.json", granted(spec))
        if read_json("../stop.json") is not None:
            write_json("stop.json", {"stop": "before", "kill_after_s": 0})
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-I", "-S", "-X", "utf8", SUPERVISOR, os.getcwd()]  # noqa: PTH109
        with theirs:
            supervisor = subprocess.Popen(argv, stdin=theirs.fileno(), start_new_session=True)  # noqa: S603
        ours.setblocking(False)
        while supervisor.poll() is None:
            self.pass_on(ours)
            select.select([self.wake], [], [], LOOK_S)
            try:
                os.read(self.wake, 4096)
            except BlockingIOError:
                continue
        return self.end()

    def pass_on(self, link: socket.socket) -> None:
        """Tell the supervisor of a stop order, once; its clock runs from there."""
        stop = None if self.told else read_json("../stop.json")
        if stop is not None:
            try:
                link.send(json.dumps(stop).encode() + b"\n")
            except OSError:
                return
            self.told = True

    def end(self) -> int:
        """Leave Slurm's own signal behind, and end as the job did."""
        write_json("slurm-end.json", {"termed": self.termed})
        last = read_json("exit.json")
        if last is None:
            return UNSTARTED
        number = last.get("signal")
        if number is not None:
            return 128 + int(number)
        code = last.get("exit_code")
        return UNSTARTED if code is None else int(code)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.exit(Batch().run())
