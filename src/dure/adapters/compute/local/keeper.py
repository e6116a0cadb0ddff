"""What the supervisor does between the start of a job's command and its last process.

Rule: standard library only, syntax of Python 3.9, few imports: they cost time in each job.
"""
# ruff: noqa: PTH109, PTH112 - pathlib costs time at each start

from __future__ import annotations

import os
import select
import signal
import socket
import time

from dure.adapters.compute.local.audience import Audience
from dure.adapters.compute.local.execute import copy_output
from dure.adapters.compute.local.joblog import JobLog
from dure.adapters.compute.local.payload import UNCAUGHT, Payload
from dure.adapters.compute.local.processes import processes, send_signal
from dure.adapters.compute.local.quota import Quota
from dure.adapters.compute.local.records import Files, boot_id, read_json, stamp, tail
from dure.adapters.runtime.inside.uncaught import collect

TYPE_CHECKING = False  # typing itself is too slow to import
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

POLL_S = 0.2
"""How often processes are looked for that are no children of this one."""
QUOTA_S = 5.0
"""How often the output folder is measured, unless the spec says otherwise."""
OOM_POLL_S = 1.0
"""How often the first layout of control groups is asked whether the kernel killed."""


class Supervisor:
    """State of one run. Everything happens in `run`, one step after another."""

    def __init__(self, spec: Fields, listener: socket.socket, umask: int) -> None:
        self.spec = spec
        self.clients = Audience(listener)
        self.files = Files(os.getcwd())
        self.log = JobLog(int(spec.get("log_limit_mib") or 0))
        self.job = Payload(spec, umask)
        self.quota = Quota(
            int(spec.get("output_limit_mib") or 0),
            self.job.uid,
            self.number("quota_every_s") or QUOTA_S,
        )
        self.boot_id = boot_id()
        self.copier = 0
        self.begun: Fields = {}
        self.running = False
        self.limit_at: float | None = None
        self.warned = False
        self.timed_out = False
        self.term_at: float | None = None
        self.term: Fields | None = None
        self.killed: Fields | None = None
        self.kill_after = 0.0
        self.oom_at: float | None = None
        self.childless = False
        self.strangers = False
        self.exit: Fields | None = None
        self.freed = False
        self.unsaid: list[str] = []

    def number(self, key: str) -> float:
        """A number of the spec; absent is 0."""
        return float(self.spec.get(key) or 0)

    # -- life --

    def run(self) -> None:
        """Until no process of the job is left and that is on disk."""
        stop = read_json("stop.json")
        if stop is not None:
            self._never_started("stopped before it started")
        elif self.spec.get("copy_from") and not os.path.isdir("out"):
            self.copier = copy_output(str(self.spec["copy_from"]), self.log.fd, self.job.uid)
            self.job.helpers.add(self.copier)
        else:
            self._start()
        while True:
            self._pump()
            self._hear()
            self._reap()
            self._clock()
            self._check_freed()
            self._save()
            if self.freed and not self.files.unsaved:
                return
            for kill_after in self.clients.wait(self._wait_ms()):
                if not self.freed:
                    self._stop(kill_after)

    def _start(self) -> None:
        self.begun = stamp()
        out = self.log.pipe(self.job.uid)
        try:
            self.job.start(out)
        except OSError as error:
            self._never_started(f"the job could not be given its place: {error}", exit_code=125)
            return
        finally:
            os.close(out)
        self.clients.poll.register(self.log.source, select.POLLIN)
        if self.job.link is not None:
            self.clients.poll.register(self.job.link, select.POLLIN)
        else:
            self._started()

    def _started(self) -> None:
        """The command itself has been executed."""
        self.running = True
        now = time.monotonic()
        if self.spec.get("time_limit_s") is not None:
            self.limit_at = now + self.number("time_limit_s")
        if self.job.group is not None and self.job.group.version == 1:
            self.oom_at = now + OOM_POLL_S
        status = {"pid": self.job.command, "started": self.begun, "boot_id": self.boot_id}
        self.files.unsaved["status.json"] = status
        self.unsaid.append("started")

    def _pump(self) -> None:
        source = self.log.source
        if source >= 0 and not self.log.pump() and self.log.source < 0:
            self.clients.poll.unregister(source)

    def _hear(self) -> None:
        """What the first program inside the jail tells."""
        link = self.job.link
        number = link.fileno() if link is not None else -1
        for event in self.job.events():
            if event["event"] == "started" and not self.running and self.exit is None:
                self.begun = stamp()
                self._started()
            elif event["event"] == "failed" and self.exit is None:
                self._no_jail(str(event.get("why")))
            elif event["event"] == "ended" and self.running and self.exit is None:
                self._ended(event)
        if number >= 0 and self.job.link is None:
            self.clients.poll.unregister(number)

    def _no_jail(self, why: str) -> None:
        self.log.say(f"the jail could not be made, nothing was started: {why}")
        self._never_started(tail("log"), exit_code=125)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return
            if not pid:
                self.childless = False
                return
            self.job.helpers.discard(pid)
            if pid == self.job.command:
                self._gone(status)
            elif pid == self.copier:
                self._copied(status)
            elif pid == self.quota.pid and self.quota.reaped(time.monotonic()):
                size = int(self.number("output_limit_mib"))
                self.log.say(
                    f"the output folder reached its limit of {size} MiB: writing files fails"
                    " until some are deleted"
                )

    def _copied(self, status: int) -> None:
        self.copier = 0
        if self.term_at is not None:
            self._never_started("stopped before it started")
        elif status == 0:
            self._start()
        else:
            self.log.say("the output of the earlier attempt could not be copied")
            self._never_started(tail("log"), exit_code=125)

    def _never_started(self, why: str, exit_code: int | None = None) -> None:
        self.exit = {"exit_code": exit_code, "stderr_tail": why, "ended": stamp()}
        self._report_exit()

    def _gone(self, status: int) -> None:
        """The process that was executed has ended; in a jail its report counts first."""
        self._pump()
        self._hear()
        if self.exit is not None:
            return
        signaled = os.WIFSIGNALED(status)
        code = None if signaled else os.WEXITSTATUS(status)
        if not self.running:
            self._no_jail(f"exit {code}" if not signaled else f"signal {os.WTERMSIG(status)}")
            return
        number = os.WTERMSIG(status) if signaled else None
        if self.job.jailed and not signaled:
            code, number = None, signal.SIGKILL  # the jail fell with all that was in it
        exception = "" if self.job.jailed else collect(UNCAUGHT, self.job.command)
        self._ended({"exit_code": code, "signal": number, "exception": exception})

    def _ended(self, how: Fields) -> None:
        self._pump()
        self.exit = {
            "exit_code": how.get("exit_code"),
            "signal": how.get("signal"),
            "exception": str(how.get("exception") or ""),
            "ended": stamp(),
        }
        group = self.job.group
        if group is not None:
            self.exit["oom_kill"] = group.oom_kills()
            self.exit["peak_mib"] = group.peak_mib()
            if group.pids_refused():
                most = (self.spec.get("limits") or {}).get("processes")
                self.log.say(f"the job may have at most {most} processes; more were refused")
        self.exit["stderr_tail"] = tail("log")
        self._report_exit()

    def _report_exit(self) -> None:
        assert self.exit is not None
        self.exit["timed_out"] = self.timed_out
        self.exit["vram_limited"] = self.number("data_limit_mib") > 0
        self.exit["boot_id"] = self.boot_id
        self._note_facts()
        self.unsaid.append("exited")

    def _note_facts(self) -> None:
        """Both times of a stop and the limits that were reached, as they are known now."""
        assert self.exit is not None
        self.exit["term"], self.exit["killed"] = self.term, self.killed
        full = {"output": self.quota.ever, "log": self.log.full}
        self.exit["full"] = [name for name, reached in full.items() if reached]
        self.files.unsaved["exit.json"] = self.exit

    def _check_freed(self) -> None:
        if self.exit is None or self.freed:
            return
        if self.quota.pid:
            send_signal(self.quota.pid, signal.SIGKILL)
        # No children means no descendants: the kernel hands every orphan to this process.
        self.strangers = self.childless and bool(self.job.others(processes()))
        if self.childless and not self.strangers:
            self._pump()
            self.freed = True
            problem = self.job.close()
            if problem:
                self.log.say(problem)
            self.exit["freed"] = stamp()
            self._note_facts()
            self.unsaid.append("freed")
        elif self.term_at is None:
            self._stop(self.number("leftover_kill_s"))

    # -- signals --

    def _stop(self, kill_after: float) -> None:
        """SIGTERM once; all times run from there, and a shorter one wins."""
        if self.term_at is not None:
            self.kill_after = min(self.kill_after, kill_after)
            return
        self.term_at, self.term = time.monotonic(), stamp()
        self.kill_after = kill_after
        if self.copier:
            send_signal(self.copier, signal.SIGKILL)
        self.job.terminate()

    def _kill_all(self) -> None:
        """Again and again, as long as processes turn up that were not there before."""
        killed: set[int] = set()
        self.killed = self.killed or stamp()
        while True:
            found = self.job.kill()
            self._reap()
            if found <= killed:
                return
            killed |= found

    def _clock(self) -> None:
        now = time.monotonic()
        running = self.running and self.exit is None
        if running and self.term_at is None and self.limit_at is not None:
            before = self.limit_at - self.number("pre_stop_before_s")
            if self.spec.get("pre_stop_signal") and not self.warned and now >= before:
                self.warned = True
                self.job.warn(str(self.spec["pre_stop_signal"]))
            if now >= self.limit_at:
                self.timed_out = True
                self._stop(self.number("kill_after_s"))
        if running and self.quota.limit and not self.quota.pid and now >= self.quota.due:
            self.quota.begin(now, self.job.everyone(processes()))
            self.job.helpers.add(self.quota.pid)
        if self.oom_at is not None and now >= self.oom_at:
            self._check_oom(now)
        if self.term_at is not None and now >= self.term_at + self.kill_after and not self.freed:
            self._kill_all()

    def _check_oom(self, now: float) -> None:
        """The second layout kills the whole group at once; on the first one this does."""
        assert self.job.group is not None
        self.oom_at = now + OOM_POLL_S
        if self.freed or self.job.group.oom_kills():
            self.oom_at = None
        if not self.freed and self.oom_at is None:
            self._kill_all()

    def _wait_ms(self) -> int | None:
        now = time.monotonic()
        at = [] if self.oom_at is None else [self.oom_at]
        if self.limit_at is not None and self.exit is None and self.term_at is None:
            early = self.spec.get("pre_stop_signal") and not self.warned
            at.append(self.limit_at - (self.number("pre_stop_before_s") if early else 0))
        if self.term_at is not None and self.killed is None:
            at.append(self.term_at + self.kill_after)
        if self.running and self.exit is None and self.quota.limit and not self.quota.pid:
            at.append(self.quota.due)
        if self.files.unsaved or self.strangers or (self.killed and not self.freed):
            at.append(now + POLL_S)
        # poll() counts milliseconds in an int: a limit of a month would not fit.
        return max(1, int(min(min(at) - now, 3600) * 1000) + 1) if at else None

    # -- files --

    def _save(self) -> None:
        """Write what is not on disk yet, then tell."""
        if self.files.save(self.spec):
            self.clients.tell(self.unsaid)
            self.unsaid = []
