"""Everything that is said to Slurm, in batches, and what its answers mean for the leases.

One thread works through: stop orders, new launches (a few at a time), then one question
for all jobs and one for all nodes. After a failure it pauses, longer each time; after a slow
answer it sends less at once. No lease ends because a command failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dure.adapters.compute.slurm import nodes, parse, submit
from dure.adapters.compute.slurm.commands import Answer, Commands
from dure.adapters.compute.slurm.leases import Durations, Lease
from dure.adapters.compute.slurm.parse import FINAL, Final, JobLine
from dure.adapters.compute.slurm.site import Site
from dure.ports import LeaseKey

SUBMITTERS = 4
BATCH = 32
"""Most launches between two looks at stops and questions."""
FORGOTTEN_LOOKS = 2
"""A job must be missing this often in good answers before Slurm has forgotten it."""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What one sweep has learned; None: that question got no answer."""

    jobs: dict[int, JobLine] | None = None
    finals: dict[int, Final] = {}
    nodes: list[parse.NodeLine] | None = None
    yielding: dict[str, int] = {}
    """GPUs of preemptible jobs by node."""
    problem: str = ""


class Talk:
    """Slurm's side of the backend; owns no lease and holds no lock of the backend."""

    def __init__(
        self,
        commands: Commands,
        site: Site,
        options: submit.Options,
        mapped: nodes.Mapped,
        durations: Durations,
    ) -> None:
        self.commands = commands
        self._site = site
        self._options = options
        self._mapped = mapped
        self._durations = durations
        self._pool = ThreadPoolExecutor(SUBMITTERS, thread_name_prefix="dure-sbatch")
        self._pause_s = 0.0
        self._accounting = True
        self._problem = ""
        self.paused_until = 0.0
        self.room = BATCH

    def close(self) -> None:
        """Wait for calls under way; each has its time limit."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # -- pace --

    def _note(self, answer: Answer) -> Answer:
        """Go slower when Slurm is slow, and stop asking for a while when it is away."""
        durations = self._durations
        if answer.away:
            longer = max(durations.pause_s, 2 * self._pause_s)
            self._pause_s = min(longer, durations.pause_max_s)
            self.paused_until = time.monotonic() + self._pause_s
            self.room = 1
        elif answer.took_s > durations.slow_s:
            self.room = max(1, self.room // 2)
        else:
            self._pause_s = self.paused_until = 0.0
            self.room = min(BATCH, self.room * 2)
        return answer

    @property
    def paused(self) -> bool:
        """Whether Slurm is left alone just now."""
        return time.monotonic() < self.paused_until

    # -- launching --

    def launch(self, leases: Sequence[Lease], done: Callable[[Lease, Answer], None]) -> None:
        """Submit; `done` is called for each as its answer comes, from other threads."""

        def one(lease: Lease) -> None:
            done(lease, self._note(self._submit(lease)))

        list(self._pool.map(one, leases))

    def _submit(self, lease: Lease) -> Answer:
        folder = self._site.attempt(lease.key)
        comment = self._site.comment(lease.key)
        argv = submit.argv(lease.launched, folder, comment, self._options)
        text = submit.script(folder, self._site.batch, self._options)
        return self.commands.run(argv, text)

    def find(self, keys: Sequence[LeaseKey]) -> dict[LeaseKey, int] | None:
        """Slurm jobs of launches whose answer was lost; None: Slurm does not say."""
        wanted = set(keys)
        lines = self.mine()
        if lines is None:
            return None
        found: dict[LeaseKey, int] = {}
        for line in sorted(lines, key=lambda line: line.id):
            key = self._site.key_of(line.comment)
            if key is not None and key in wanted:
                # The first one: a second submission finds the run directory taken.
                found.setdefault(key, line.id)
        return found

    def mine(self) -> list[JobLine] | None:
        """All jobs of this installation that Slurm still knows."""
        argv = ["squeue", "-h", "-t", "all", "-o", parse.JOB_FORMAT]
        answer = self._note(self.commands.run(argv))
        if not answer.ok:
            return None
        lines = parse.job_lines(answer.out)
        return [line for line in lines if self._site.key_of(line.comment) is not None]

    # -- stopping --

    def signal(self, ids: Sequence[int]) -> bool:
        """Make batch jobs look at their stop orders; what has not started is cancelled."""
        text = [str(number) for number in ids]
        pending = self._note(self.commands.run(["scancel", "--state=PENDING", *text]))
        argv = ["scancel", "--batch", "--signal=USR1", "--state=RUNNING", *text]
        return pending.ok and self._note(self.commands.run(argv)).ok

    def cancel(self, ids: Sequence[int], *, pending_only: bool = False) -> bool:
        """Let Slurm itself end jobs, by its own clock (KillWait)."""
        state = ["--state=PENDING"] if pending_only else []
        argv = ["scancel", *state, *(str(number) for number in ids)]
        return self._note(self.commands.run(argv)).ok

    # -- asking --

    def ask(self, ids: Sequence[int]) -> Word:
        """One question for all jobs, one for all nodes; ended jobs also tell how."""
        jobs, finals = self._jobs(ids)
        if jobs is None:
            return Word(problem=self._problem)
        answer = self._note(self.commands.run(["scontrol", "-d", "-o", "show", "node"]))
        if not answer.ok:
            return Word(jobs=jobs, finals=finals, problem=answer.problem)
        lines = parse.node_lines(answer.out)
        return Word(jobs=jobs, finals=finals, nodes=lines, yielding=self._yielding())

    def _jobs(self, ids: Sequence[int]) -> tuple[dict[int, JobLine] | None, dict[int, Final]]:
        self._problem = ""
        if not ids:
            return {}, {}
        argv = ["squeue", "-h", "-t", "all", "-j", parse.ids(ids), "-o", parse.JOB_FORMAT]
        answer = self._note(self.commands.run(argv))
        if "Invalid job id" in answer.problem:
            answer = Answer(ok=True)  # the only one, or all of them, are forgotten
        if not answer.ok:
            self._problem = answer.problem
            return None, {}
        jobs = {line.id: line for line in parse.job_lines(answer.out)}
        over = [number for number, line in jobs.items() if line.state in FINAL]
        gone = [number for number in ids if number not in jobs]
        return jobs, {**self._finals(over), **self._accounted(gone)}

    def _finals(self, ids: Sequence[int]) -> dict[int, Final]:
        """Exit codes: squeue has none. One process asks for all of them."""
        if not ids:
            return {}
        text = "".join(f"show job {number}\n" for number in ids)
        answer = self._note(self.commands.run(["scontrol", "-o"], text))
        return parse.finals(answer.out) if answer.ok else {}

    def _accounted(self, ids: Sequence[int]) -> dict[int, Final]:
        """Jobs older than MinJobAge: slurmdbd knows them, where there is one."""
        if not ids or not self._accounting:
            return {}
        argv = ["sacct", "-n", "-P", "-X", "-j", parse.ids(ids), "-o", parse.SACCT_FORMAT]
        answer = self.commands.run(argv)
        if "disabled" in answer.problem or "disabled" in answer.out:
            self._accounting = False
        return parse.sacct_finals(answer.out) if answer.ok else {}

    def _yielding(self) -> dict[str, int]:
        """GPUs that preemptible jobs use, of jobs on one node; others count as foreign."""
        if not self._mapped.preemptible:
            return {}
        names = ",".join(self._mapped.preemptible)
        answer = self.commands.run(["squeue", "-h", "-t", "R", "-p", names, "-o", "%D|%N|%b"])
        found: dict[str, int] = {}
        for line in answer.out.splitlines() if answer.ok else ():
            count, node, tres = [*line.split("|"), "", ""][:3]
            gpus = sum(part.count for part in parse.gres(tres.removeprefix("gres:")))
            if count == "1":
                found[node] = found.get(node, 0) + gpus
        return found
