"""The two threads of the backend: one looks at files, the other talks to Slurm.

They are two because a hung slurmctld blocks each command for seconds, and the end of a job
must be told at once all the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from dure.adapters.compute.local.rundir import Stop
from dure.adapters.compute.slurm import submit
from dure.adapters.compute.slurm.commands import Answer
from dure.adapters.compute.slurm.leases import Durations, Lease, Story, read_files
from dure.adapters.compute.slurm.parse import FINAL, Final
from dure.adapters.compute.slurm.site import Launched, Site
from dure.adapters.compute.slurm.state import State
from dure.adapters.compute.slurm.talk import FORGOTTEN_LOOKS, Talk, Word
from dure.ports import Beat, Observation, StopKind

log = logging.getLogger(__name__)
AGAIN_S = 5.0
"""A stop signal is repeated so often while the job runs on."""


class Watch:
    """Runs from `start` to `close`."""

    def __init__(
        self, state: State, site: Site, talk: Talk, story: Story, durations: Durations
    ) -> None:
        self.hint: Callable[[], None] = lambda: None
        self._state = state
        self._site = site
        self._talk = talk
        self._story = story
        self._durations = durations
        self._closed = False
        self._work = threading.Event()
        self._files = threading.Event()
        self._ask_at = 0.0
        self._asked_at = 0.0
        self._adopted = False
        self._begun = False
        self._threads = [
            threading.Thread(target=self._run, args=(self._look,), name="dure-slurm-files"),
            threading.Thread(target=self._run, args=(self._speak,), name="dure-slurm"),
        ]

    def start(self) -> None:
        """Ask once, so that the nodes are known, then go on in the background."""
        self._sweep()
        self._begun = True
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def wake(self) -> None:
        """There is something to send."""
        self._work.set()

    def close(self) -> None:
        """End both threads; a command under way is waited for."""
        self._closed = True
        self._work.set()
        self._files.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        self._talk.close()

    def _run(self, turn: Callable[[], None]) -> None:
        while not self._closed:
            try:
                turn()
            except Exception:
                # Loop top: one bad file or answer must not blind the server to all jobs.
                log.exception("slurm backend")
                time.sleep(0.2)

    # -- files --

    def _look(self) -> None:
        self._files.wait(self._durations.poll_s)
        self._files.clear()
        with self._state.lock:
            held = list(self._state.leases.values())
        news = False
        for lease in held:
            files = read_files(lease)
            with self._state.lock:
                news |= self._tell(lease, self._story.advance(lease, files))
                self._finish(lease)
                news |= self._beat(lease)
                if lease.wants_word and time.monotonic() >= self._asked_at + 0.2:
                    self._ask_at = 0.0
                    self._work.set()
        if news:
            self.hint()

    def _tell(self, lease: Lease, seen: Iterable[Observation]) -> bool:
        news = False
        for observation in seen:
            if not lease.fenced:
                self._state.record.add(observation)
                news = True
        return news

    def _finish(self, lease: Lease) -> None:
        """What was fenced needs no acknowledgement."""
        if lease.freed and lease.fenced:
            self._state.drop(lease.key)
            self._site.book.collect(lease.key)

    def _beat(self, lease: Lease) -> bool:
        """A lease that Slurm has just shown as running was seen alive."""
        now = time.monotonic()
        quiet = lease.end_at or lease.exited or lease.fenced or not lease.started
        if quiet or self._state.problem or lease.state != "RUNNING" or now < lease.beat_at:
            return False
        lease.beat_at = now + self._durations.beat_s
        beat = Beat(key=lease.key, at_ms=self._state.clock.now_ms())
        return self._state.record.beat(beat)

    # -- Slurm --

    def _speak(self) -> None:
        wait = self._ask_at - time.monotonic()
        if self._talk.paused:
            wait = self._talk.paused_until - time.monotonic()
        with self._state.lock:
            due = [lease.signal_at for lease in self._state.stopping()]
        if due and not self._talk.paused:
            wait = min(wait, min(due) - time.monotonic())
        self._work.wait(min(max(0.0, wait), self._durations.query_s))
        self._work.clear()
        if self._closed or self._talk.paused:
            time.sleep(0.05)
            return
        self._send_stops()
        more = self._send_launches()
        if time.monotonic() >= self._ask_at:
            self._sweep()
        if more:
            self._work.set()

    def _send_stops(self) -> None:
        now = time.monotonic()
        with self._state.lock:
            due = [lease for lease in self._state.stopping() if lease.signal_at <= now]
            unsent = [lease for lease in due if not lease.launched.asked]
            for lease in unsent:
                lease.signal_at = 0.0
                self._tell(lease, self._story.give_up(lease))
                self._finish(lease)
            sent = [lease for lease in due if lease.slurm_id]
            hard = [lease.slurm_id for lease in sent if self._overdue(lease, now)]
            ids = [lease.slurm_id for lease in sent if lease.slurm_id not in hard]
        if unsent:
            self.hint()
        done = not ids or self._talk.signal(ids)
        done &= not hard or self._talk.cancel(hard)
        for lease in sent:
            # Repeated while it runs on: the node may have been away, or Slurm.
            lease.signal_at = time.monotonic() + (AGAIN_S if done else 1.0)
            if lease.final is not None:
                lease.signal_at = 0.0
        if ids or hard:
            self._ask_at = min(self._ask_at, time.monotonic() + 0.3)

    def _overdue(self, lease: Lease, now: float) -> bool:
        """The node should have killed it long ago: now Slurm is to end it."""
        kill_s = lease.stop.kill_after_s if lease.stop is not None else 0.0
        return now >= lease.stop_at + kill_s + self._durations.stop_margin_s

    def _send_launches(self) -> bool:
        with self._state.lock:
            lost = [lease for lease in self._state.unsent() if lease.launched.asked]
        if lost and not self._find_lost(lost):
            return False
        with self._state.lock:
            waiting = self._state.unsent()
        ready = waiting[: self._talk.room]
        for lease in ready:
            self._note(lease, asked=True)
        self._talk.launch(ready, self._answered)
        if ready:
            self._ask_at = min(self._ask_at, time.monotonic() + 1.0)
        return len(waiting) > len(ready) and not self._talk.paused

    def _find_lost(self, lost: list[Lease]) -> bool:
        """Launches whose answer never came: look before sending them again."""
        found = self._talk.find([lease.key for lease in lost])
        if found is None:
            return False
        for lease in lost:
            number = found.get(lease.key)
            if number is not None:
                self._note(lease, asked=True, slurm_id=number)
            elif lease.stop is not None or lease.run.status() is not None:
                # Ended and forgotten by Slurm, or not wanted any more: never sent again.
                with self._state.lock:
                    self._forgotten(lease)
            else:
                self._note(lease, asked=False)
        return True

    def _answered(self, lease: Lease, answer: Answer) -> None:
        """One sbatch has ended. Without an answer the launch is looked for later."""
        number = submit.job_id(answer.out) if answer.ok else 0
        if number:
            self._note(lease, asked=True, slurm_id=number)
            return
        if answer.away:
            log.warning("job %d: no answer from sbatch: %s", lease.key.job, answer.problem)
            return
        log.warning("job %d: Slurm refuses it: %s", lease.key.job, answer.problem)
        self._note(lease, asked=False)
        with self._state.lock:
            news = self._tell(lease, self._story.give_up(lease))
            self._finish(lease)
        if news:
            self.hint()

    def _note(self, lease: Lease, *, asked: bool, slurm_id: int = 0) -> None:
        """Write a launch's progress down before anything else happens to it."""
        launched: Launched = msgspec.structs.replace(lease.launched, asked=asked, slurm_id=slurm_id)
        self._site.record(lease.key, launched)
        with self._state.lock:
            lease.launched = launched
            lease.held_at = time.monotonic()

    # -- sweep --

    def _sweep(self) -> None:
        with self._state.lock:
            ids = [lease.slurm_id for lease in self._state.all() if lease.holds]
        word = self._talk.ask(ids)
        self._asked_at = time.monotonic()
        self._ask_at = self._asked_at + self._durations.query_s
        with self._state.lock:
            news = self._state.reached(word.problem)
            if word.jobs is not None:
                self._hear(word, set(ids))
            if word.nodes is not None:
                news |= self._state.compare(word.nodes, word.yielding, tell=self._begun)
        if word.jobs is not None and not self._adopted:
            self._adopt()
        self._end_overdue()
        self._files.set()
        if news:
            self.hint()

    def _hear(self, word: Word, asked: set[int]) -> None:
        assert word.jobs is not None
        for lease in self._state.all():
            if not lease.holds or lease.slurm_id not in asked:
                continue
            line, final = word.jobs.get(lease.slurm_id), word.finals.get(lease.slurm_id)
            if final is not None:
                lease.settle(final)
            elif line is not None:
                # An ended job whose exit code was not told is asked again.
                lease.hear(line)
            else:
                lease.missed += 1
                if lease.missed >= FORGOTTEN_LOOKS:
                    self._forgotten(lease)
        for key in [key for key, lease in self._state.closing.items() if not lease.holds]:
            del self._state.closing[key]

    def _forgotten(self, lease: Lease) -> None:
        """Slurm knows nothing of it any more. Should it run on, its node is to end it.

        A controller that lost its newest state forgets jobs that run. Without this order
        their GPUs would be given out while they still compute.
        """
        lease.settle(Final(state="UNKNOWN"))
        runs = lease.run.status() is not None and lease.run.exit() is None
        if runs and lease.stop is None:
            lease.orphaned_ms = self._state.clock.now_ms()
            log.warning("job %d: Slurm has forgotten it while it ran", lease.key.job)
            kill_s = self._durations.lost_kill_s
            self._site.order_stop(lease.key, Stop(stop=StopKind.LOST, kill_after_s=kill_s))

    def _end_overdue(self) -> None:
        """Launches that Slurm does not start, and jobs that pretend to have ended."""
        now = time.monotonic()
        with self._state.lock:
            pending = self._state.pending(held_before=now - self._durations.pending_s)
            pretend = self._state.pretending(ended_before=now - self._durations.stop_margin_s)
            for lease in pending:
                lease.cancelled = True
        if pending:
            self._talk.cancel([lease.slurm_id for lease in pending], pending_only=True)
        if pretend:
            self._talk.cancel(pretend)

    def _adopt(self) -> None:
        """Once, after a start: jobs of ours in Slurm that nothing here stands for are ended."""
        lines = self._talk.mine()
        if lines is None:
            return
        self._adopted = True
        with self._state.lock:
            known = {lease.slurm_id for lease in self._state.all()}
            asked = {key for key, lease in self._state.leases.items() if not lease.slurm_id}
        strange = [
            line.id
            for line in lines
            if line.state not in FINAL
            and line.id not in known
            and self._site.key_of(line.comment) not in asked
        ]
        if strange:
            log.warning("Slurm jobs that no lease stands for are cancelled: %s", strange)
            self._talk.cancel(strange)
