"""A real Slurm cluster on this machine, thrown away after use: for tests and benchmarks.

One slurmctld and one slurmd a node (Debian's slurmd takes a node name), all on 127.0.0.1, on
ports that were free, with all state in one folder. GPUs are character devices without a
driver: Slurm counts them and hands them out, nothing can compute on them. Needs root, for
device files and for jobs under other accounts. By hand: `python tools/slurm_testbed.py DIR`
runs one until Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "setpriv")
PACKAGES = "slurmctld slurmd slurm-client munge"
SBIN = ("/usr/sbin", "/sbin")
PREEMPTIBLE = "backfill"


def unavailable() -> str:
    """Why no testbed can run on this machine; empty if one can."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SBIN])
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"no {', '.join(missing)}: install {PACKAGES}"
    if os.geteuid() != 0:
        return "a Slurm with jobs of several accounts needs root"
    host = socket.gethostname().split(".")[0]
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "nothing"
    return "" if address.startswith("127.") else f"host name {host} means {address}, not 127.x"


@dataclass(frozen=True)
class NodeSpec:
    """One node of the cluster."""

    name: str
    gres_type: str = "rtx4090"
    gpus: int = 2
    cores: int = 16
    memory_mib: int = 64_000


SMALL = (
    NodeSpec("gpu-4090-1"),
    NodeSpec("gpu-4090-2"),
    NodeSpec("gpu-3080ti-1", gres_type="rtx3080ti"),
    NodeSpec("gpu-3080ti-2", gres_type="rtx3080ti"),
)


@dataclass
class Testbed:
    """Start with `up`, end with `down`. `extra` lines go to the end of slurm.conf."""

    folder: Path
    nodes: tuple[NodeSpec, ...] = SMALL
    kill_wait_s: int = 5
    min_job_age_s: int = 300
    slurmd_timeout_s: int = 15
    scheduler: str = "batch_sched_delay=0,sched_min_interval=0,bf_interval=5,bf_continue"
    cgroup: bool = False
    preempt: bool = True
    """With it each submission looks at every job: 50,000 of them take minutes."""
    extra: str = ""
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    __test__ = False  # pytest: no test class

    @property
    def conf(self) -> Path:
        """The cluster's slurm.conf."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """Environment that makes Slurm's commands speak to this cluster."""
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SBIN])
        return {"PATH": path, "SLURM_CONF": str(self.conf), "LC_ALL": "C", "HOME": "/"}

    def run(self, *argv: str, check: bool = True, timeout_s: float = 20) -> str:
        """Standard output of one of Slurm's commands."""
        done = subprocess.run(
            argv, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    # -- life --

    def up(self, timeout_s: float = 60) -> None:
        """Write the configuration, start all daemons, wait until every node is idle."""
        self._write()
        self._munge()
        self.start_controller()
        for node in self.nodes:
            self.start_node(node.name)
        self.wait(self._all_idle, timeout_s, "not all nodes became idle")

    def down(self) -> None:
        """End every daemon and every process of every job; remove the folder."""
        # The controller first, so that nothing is started again behind our back.
        names = ["slurmctld", *(f"slurmd-{node.name}" for node in self.nodes), "munged"]
        for name in names:
            self._stop(name)
        self._kill_jobs()
        self._remove_cgroups()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def wait(self, what: Callable[[], object], timeout_s: float, why: str) -> None:
        """Until `what` is true; else say why not, with the end of the controller's log."""
        end = time.monotonic() + timeout_s
        while not what():
            controller = self.daemons.get("slurmctld")
            if time.monotonic() > end or controller is None or controller.poll() is not None:
                log = self.folder / "log" / "slurmctld.log"
                tail = log.read_text().splitlines()[-5:] if log.is_file() else []
                raise RuntimeError("\n".join([why, *tail]))
            time.sleep(0.1)

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split()
        return bool(states) and set(states) <= {"idle"}

    # -- parts --

    def start_controller(self) -> None:
        """Start slurmctld on the saved state, if any, and wait until it answers."""
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        self.wait(lambda: "is UP" in self.run("scontrol", "ping", check=False), 20, "no slurmctld")

    def stop_controller(self) -> None:
        """A power cut of the controller: SIGKILL."""
        self._stop("slurmctld", signal.SIGKILL)

    def pause_controller(self) -> None:
        """Let slurmctld hang: it keeps its port and answers nothing."""
        self.daemons["slurmctld"].send_signal(signal.SIGSTOP)

    def resume_controller(self) -> None:
        """Let it go on."""
        self.daemons["slurmctld"].send_signal(signal.SIGCONT)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd."""
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        self._start(f"slurmd-{name}", "slurmd", "-D", "-N", name, "-f", str(self.conf))

    def kill_node(self, name: str) -> None:
        """A power cut of a node: its slurmd and all processes of its jobs, SIGKILL."""
        self._stop(f"slurmd-{name}", signal.SIGKILL)
        self._kill_jobs(name)

    def _start(self, name: str, *argv: str) -> None:
        # Should whoever runs this be killed, no daemon stays behind.
        log = (self.folder / "log" / f"{name}.out").open("ab")
        with log:
            self.daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _stop(self, name: str, number: int = signal.SIGTERM) -> None:
        daemon = self.daemons.pop(name, None)
        if daemon is None:
            return
        for sent in (signal.SIGCONT, number):
            daemon.send_signal(sent)
        try:
            daemon.wait(5)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    # -- configuration --

    def _write(self) -> None:
        for name in ("etc", "munge", "state", "spool", "log", "run", "dev"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        (self.folder / "state").chmod(0o700)
        key = self.folder / "munge" / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        gpu_count = max(node.gpus for node in self.nodes)
        for index in range(gpu_count):
            # Major 120 is kept for experiments: no driver stands behind it.
            device = self.folder / "dev" / f"gpu{index}"
            if not device.exists():
                os.mknod(device, 0o020666, os.makedev(120, index))
                device.chmod(0o666)
        port, *ports = free_ports(1 + len(self.nodes))
        lines = [*self._settings(port), *self._nodes(ports), *self._partitions(), self.extra]
        self.conf.write_text("\n".join(lines) + "\n")
        gres = [
            f"NodeName={n.name} Name=gpu Type={n.gres_type} File={self.folder}/dev/gpu{i}"
            for n in self.nodes
            for i in range(n.gpus)
        ]
        (self.folder / "etc" / "gres.conf").write_text("\n".join(gres) + "\n")
        plugin = "cgroup/v1" if self.cgroup else "autodetect"
        cgroup = [f"CgroupPlugin={plugin}", "CgroupAutomount=no", "ConstrainRAMSpace=yes"]
        (self.folder / "etc" / "cgroup.conf").write_text("\n".join(cgroup) + "\n")

    def _settings(self, port: int) -> Iterator[str]:
        host = socket.gethostname().split(".")[0]
        track = "cgroup" if self.cgroup else "linuxproc"
        values = {
            "ClusterName": "testbed",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": port,
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "AuthInfo": f"socket={self.folder}/munge/munge.sock,cred_expire=5",
            # Bind to 127.0.0.1 and not to every address, daemons and clients alike.
            "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": f"{self.folder}/spool/%n",
            "SlurmctldPidFile": self.folder / "run" / "slurmctld.pid",
            "SlurmdPidFile": f"{self.folder}/run/slurmd-%n.pid",
            "SlurmctldLogFile": self.folder / "log" / "slurmctld.log",
            "SlurmdLogFile": f"{self.folder}/log/slurmd-%n.log",
            # Nodes claim more cores and memory than this machine has.
            "SlurmdParameters": "config_overrides",
            "MpiDefault": "none",
            "SwitchType": "switch/none",
            "ReturnToService": 2,
            "SlurmdTimeout": self.slurmd_timeout_s,
            "KillWait": self.kill_wait_s,
            "MinJobAge": self.min_job_age_s,
            "MaxJobCount": 100_000,
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory",
            "SchedulerType": "sched/backfill",
            "PriorityType": "priority/basic",
            "PreemptType": f"preempt/{'partition_prio' if self.preempt else 'none'}",
            "PreemptMode": "REQUEUE" if self.preempt else "OFF",
            "GresTypes": "gpu",
            "AccountingStorageType": "accounting_storage/none",
            "JobCompType": "jobcomp/none",
            "ProctrackType": f"proctrack/{track}",
            "TaskPlugin": "task/cgroup" if self.cgroup else "task/none",
            "JobAcctGatherType": f"jobacct_gather/{'cgroup' if self.cgroup else 'none'}",
        }
        if self.scheduler:
            values["SchedulerParameters"] = self.scheduler
        for key, value in values.items():
            yield f"{key}={value}"

    def _nodes(self, ports: list[int]) -> Iterator[str]:
        host = socket.gethostname().split(".")[0]
        for n, port in zip(self.nodes, ports, strict=True):
            yield (
                f"NodeName={n.name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
                f"CPUs={n.cores} RealMemory={n.memory_mib} Gres=gpu:{n.gres_type}:{n.gpus}"
            )

    def _partitions(self) -> Iterator[str]:
        for kind in sorted({n.gres_type for n in self.nodes}):
            names = ",".join(n.name for n in self.nodes if n.gres_type == kind)
            yield (
                f"PartitionName={kind} Nodes={names} PriorityTier=10 PreemptMode=OFF "
                "DefMemPerCPU=500 MaxTime=UNLIMITED"
            )
        if not self.preempt:
            return
        yield (
            f"PartitionName={PREEMPTIBLE} Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE "
            "GraceTime=0 DefMemPerCPU=500 MaxTime=UNLIMITED"
        )

    def _munge(self) -> None:
        at = self.folder / "munge"
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={at}/munge.key",
            f"--socket={at}/munge.sock",
            f"--pid-file={at}/munged.pid",
            f"--log-file={at}/munged.log",
            f"--seed-file={at}/munge.seed",
        )
        at.chmod(0o755)
        end = time.monotonic() + 10
        while not (at / "munge.sock").exists():
            if time.monotonic() > end:
                raise RuntimeError(f"munged does not start; see {self.folder}/log/munged.out")
            time.sleep(0.02)

    # -- processes of jobs --

    def _kill_jobs(self, node: str = "") -> None:
        """Supervisors of Slurm outlive slurmd: end them with everything below them."""
        while True:
            victims = set(self._steps(node))
            victims |= below(victims)
            if not node:
                victims |= self._strays()
            if not victims:
                return
            for pid in victims:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue
            time.sleep(0.02)

    def _steps(self, node: str) -> Iterator[int]:
        """Slurm's supervisor overwrites its name and environment, but keeps its node's log open."""
        log = f"{self.folder}/log/slurmd-{node}"
        for pid in pids():
            if read(f"/proc/{pid}/comm").strip() != b"slurmstepd" or is_dead(pid):
                continue
            try:
                links = [str(f.readlink()) for f in Path(f"/proc/{pid}/fd").iterdir()]
            except OSError:
                continue
            if any(link.startswith(log) and (not node or link == f"{log}.log") for link in links):
                yield pid

    def _strays(self) -> set[int]:
        """Processes of jobs that have left their supervisor's tree."""
        mark = f"SLURM_CONF={self.conf}".encode()
        found = set()
        for pid in pids():
            names = read(f"/proc/{pid}/environ").split(b"\0")
            if mark in names and any(n.startswith(b"SLURM_JOB_ID=") for n in names):
                found.add(pid)
        return {pid for pid in found - {os.getpid()} if not is_dead(pid)}

    def _remove_cgroups(self) -> None:
        """Slurm leaves empty groups behind; only empty ones can be removed."""
        for node in self.nodes:
            for top in Path("/sys/fs/cgroup").glob(f"*/slurm_{node.name}"):
                for folder in sorted(top.rglob("*"), key=lambda p: -len(p.parts)):
                    if folder.is_dir():
                        remove_group(folder)
                remove_group(top)


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now."""
    with contextlib.ExitStack() as held:
        socks = [held.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in socks]


def pids() -> list[int]:
    """Every process of the machine."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def read(path: str) -> bytes:
    """A file of a process that may be gone."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def is_dead(pid: int) -> bool:
    """Gone, or a zombie that nobody has collected."""
    stat = read(f"/proc/{pid}/stat")
    return not stat or stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] in b"ZX"


def below(roots: set[int]) -> set[int]:
    """Descendants of `roots`."""
    parents = {}
    for pid in pids():
        stat = read(f"/proc/{pid}/stat")
        if stat:
            parents[pid] = int(stat[stat.rindex(b")") + 2 :].split()[1])
    found = set(roots)
    while True:
        more = {p for p, parent in parents.items() if parent in found and p not in found}
        if not more:
            return {pid for pid in found - roots if not is_dead(pid)}
        found |= more


def remove_group(folder: Path) -> None:
    """Remove a cgroup if it is empty; a killed process may take a moment to leave it."""
    for _ in range(20):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return


def main() -> None:
    """Run the small cluster until Ctrl-C."""
    why = unavailable()
    if why:
        sys.exit(f"slurm_testbed: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Testbed(Path(sys.argv[1]).resolve()) as bed:
        print(f"export SLURM_CONF={bed.conf}", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
