"""Agents that die between any two calls, freeze, and deliver twice; a control plane over them.

`Chaos.run` returns what happened. The control plane here does what store and planner do in
the product: it issues epochs, keeps a few dispatches out per node, and decides after a loss.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dure.core.lease import (
    BeatAnswer,
    Claim,
    Commit,
    End,
    Enqueued,
    LeaseBeat,
    NodeMark,
    NodeReport,
    QueueAway,
    Report,
    SweepRule,
    Task,
    TaskStatus,
    TaskView,
    Ticket,
)
from dure.core.model import JobId, NodeHealth, NodeId
from dure.ports import LeaseKey, LeaseQueue

S = TaskStatus
CRASH, FREEZE, AGAIN = 0.03, 0.25, 0.10
AHEAD = 24
"""Dispatches that are out at a time, per node."""


class Crash(Exception):  # noqa: N818 - says what happens
    """An agent process ends here and now."""


class Chaos:
    def __init__(self, queue: LeaseQueue, seed: int, tasks: int, *, ttl_s: float, agents: int = 5):
        self.queue = queue
        self.tasks = tasks
        self.ttl_s = ttl_s
        self.seed = seed
        self.nodes = [NodeId(f"n{i}") for i in range(agents)]
        self.count: Counter[str] = Counter()
        self.commits: dict[JobId, set[str]] = defaultdict(set)
        self.results: dict[JobId, bytes] = {}
        self.wrong: list[str] = []
        self.disturb: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, limit_s: float) -> None:
        control = _Control(self)
        work = [control.run, control.sweep, control.sweep, *self.disturb]
        work += [lambda node=node: _Agent(self, node).run() for node in self.nodes]
        threads = [threading.Thread(target=self._guarded(w), daemon=True) for w in work]
        for thread in threads:
            thread.start()
        self._stop.wait(limit_s)
        self._stop.set()
        for thread in threads:
            thread.join(10)

    def _guarded(self, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.wrong.append(f"{work}: {error!r}")
                self._stop.set()
                raise

        return run

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def finish(self) -> None:
        self._stop.set()

    def sleep(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def tally(self, what: str) -> None:
        with self._lock:
            self.count[what] += 1

    def committed(self, ticket: Ticket, answer: Commit) -> None:
        self.tally(answer.value)
        if answer in (Commit.OK, Commit.DUP):
            with self._lock:
                self.commits[ticket.job].add(f"{ticket.epoch}:{ticket.lease_id}")


class _Control:
    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos
        self.random = random.Random(chaos.seed)
        self.epochs: dict[JobId, int] = dict.fromkeys(map(JobId, range(1, chaos.tasks + 1)), 0)
        self.waiting: deque[JobId] = deque(self.epochs)
        self.again: dict[JobId, float] = {}
        self.out: dict[JobId, NodeId] = {}
        self.settled: set[JobId] = set()
        self.told: dict[JobId, int] = {}

    def run(self) -> None:
        cursor = 0
        while not self.chaos.stopped:
            try:
                cursor = self._turn(cursor)
            except QueueAway:
                self.chaos.tally("control away")
                self.chaos.sleep(0.02)

    def _turn(self, cursor: int) -> int:
        chaos = self.chaos
        chaos.queue.news(0.02)
        seen = chaos.queue.changes(cursor)
        for view in seen.tasks:
            if view.epoch == self.epochs[view.job]:
                self._look(view)
        node = self.random.choice(chaos.nodes)
        health = self.random.choice([NodeHealth.OFFLINE, NodeHealth.OFFLINE, NodeHealth.STABLE])
        chaos.queue.mark([NodeMark(node=node, state=health, ready=True)])
        self._dispatch()
        if len(self.settled) == chaos.tasks:
            chaos.finish()
        return seen.cursor

    def _look(self, view: TaskView) -> None:
        job, chaos = view.job, self.chaos
        before = chaos.results.get(job)
        if before is not None and view.result != before:
            chaos.wrong.append(f"job {job}: {before!r} became {view.result!r}")
        if view.status is S.DONE:
            chaos.results[job] = view.result
            self.again.pop(job, None)
            self.out.pop(job, None)
            if view.freed_ms:
                self.settled.add(job)  # first: the answer may be lost, and it is told no more
                chaos.queue.settle([LeaseKey(job=job, epoch=view.epoch)])
        elif view.status in (S.FAILED, S.NODE_WAIT):
            self.out.pop(job, None)
            if self.told.get(job) != view.expired_ms:
                self.told[job] = view.expired_ms
                wait_s = self.random.random() * (1.0 if view.status is S.NODE_WAIT else 0.1)
                self.again[job] = time.monotonic() + wait_s * chaos.ttl_s * 6
                chaos.tally(f"lost {view.status.value}")
        else:
            self.again.pop(job, None)
            self.out[job] = view.node

    def _dispatch(self) -> None:
        now = time.monotonic()
        due = [job for job, at in self.again.items() if at <= now]
        room = AHEAD * len(self.chaos.nodes) - len(self.out)
        chosen = (due + list(self.waiting))[: max(0, room)]
        if not chosen:
            return
        for job in chosen:
            # Written ahead, as the store does: from here on nothing older is recorded.
            self.epochs[job] += 1
            self.again.pop(job, None)
            self.out[job] = self.chaos.nodes[(job + self.epochs[job]) % len(self.chaos.nodes)]
            if self.waiting and self.waiting[0] == job:
                self.waiting.popleft()
        self._launch([self._task(job) for job in chosen])

    def _launch(self, batch: list[Task]) -> None:
        moved = [t for t in batch if t.epoch > 1 and self.random.random() < 0.3]
        while not self.chaos.stopped:
            try:
                self.chaos.queue.fence([LeaseKey(job=t.job, epoch=t.epoch - 1) for t in moved])
                answers = self.chaos.queue.enqueue(batch)
            except QueueAway:
                self.chaos.sleep(0.02)
            else:
                assert set(answers) <= {Enqueued.QUEUED, Enqueued.KNOWN}, answers
                return

    def _task(self, job: JobId) -> Task:
        return Task(job=job, epoch=self.epochs[job], node=self.out[job], payload=b"work")

    def sweep(self) -> None:
        """Two of these race. Each waits one TTL for a new run id, and one after a brake."""
        chaos = self.chaos
        run_id, armed_at, free_at = "", 0.0, 0.0
        while not chaos.stopped:
            chaos.sleep(0.03)
            now = time.monotonic()
            brake = not (free_at and now >= free_at)
            rule = SweepRule(run_id=run_id if now >= armed_at else "", ack_ms=400, brake=brake)
            try:
                swept = chaos.queue.sweep(rule)
            except QueueAway:
                armed_at = time.monotonic() + chaos.ttl_s
                continue
            if swept.run_id != run_id:
                run_id, armed_at = swept.run_id, now + chaos.ttl_s
            if swept.braked:
                free_at = free_at or now + chaos.ttl_s
                chaos.tally("brake")
            elif now >= armed_at:
                free_at = 0.0


class _Agent:
    def __init__(self, chaos: Chaos, node: NodeId) -> None:
        self.chaos = chaos
        self.node = node
        self.random = random.Random(f"{chaos.seed}/{node}")
        self.held: list[Ticket] = []
        self.frozen: list[tuple[float, Ticket]] = []
        self.repeats: list[Report] = []
        self.sample = 0

    def run(self) -> None:
        while not self.chaos.stopped:
            try:
                self._turn()
            except Crash:
                self.chaos.tally("crash")
                self.held, self.repeats = [], []
            except QueueAway:
                self.chaos.tally("agent away")
                self.chaos.sleep(0.02)

    @contextmanager
    def _call(self) -> Iterator[LeaseQueue]:
        """One call; the agent may die before it and after it."""
        self._perhaps_die()
        yield self.chaos.queue
        self._perhaps_die()

    def _perhaps_die(self) -> None:
        if self.random.random() < CRASH / 2:
            raise Crash

    def _turn(self) -> None:
        with self._call() as queue:
            ids = [f"{self.random.getrandbits(64):x}" for _ in range(6)]
            claims = queue.claim(self.node, ids)
        self._accept(claims)
        if not claims:
            self.chaos.queue.doorbell(self.node, 0.01)
        self._beat(self.held)
        for ticket in list(self.held):
            self._deliver(ticket)
            self.held.remove(ticket)
        self._thaw()
        self._redeliver()

    def _accept(self, claims: list[Claim]) -> None:
        for claim in claims:
            if self.random.random() < FREEZE:
                until = time.monotonic() + self.chaos.ttl_s * self.random.uniform(1.0, 3.0)
                self.frozen.append((until, claim.ticket))
                self.chaos.tally("frozen")
            else:
                self.held.append(claim.ticket)

    def _beat(self, tickets: list[Ticket]) -> list[Ticket]:
        """Beat for these; what is lost is let go of."""
        self.sample += 1
        with self._call() as queue:
            beats = [LeaseBeat(ticket=t, started_age_ms=1) for t in tickets]
            reply = queue.beat(NodeReport(node=self.node, sample=self.sample), beats)
        kept = []
        for ticket, verdict in zip(list(tickets), reply.verdicts, strict=True):
            self.chaos.tally(f"beat {verdict.answer.value}")
            if verdict.answer is BeatAnswer.LOST:
                if ticket in self.held:
                    self.held.remove(ticket)
            else:
                kept.append(ticket)
        return kept

    def _thaw(self) -> None:
        now = time.monotonic()
        awake = [t for until, t in self.frozen if until <= now]
        self.frozen = [(until, t) for until, t in self.frozen if until > now]
        careful = [t for t in awake if self.random.random() < 0.7]
        for ticket in [*self._beat(careful), *(t for t in awake if t not in careful)]:
            self._deliver(ticket)

    def _deliver(self, ticket: Ticket) -> None:
        result = f"{ticket.epoch}:{ticket.lease_id}".encode()
        report = Report(ticket=ticket, end=End.DONE, result=result, freed_age_ms=0)
        self._send(report)
        if self.random.random() < AGAIN:
            self.repeats.append(report)

    def _redeliver(self) -> None:
        repeats, self.repeats = self.repeats, []
        for report in repeats:
            self.chaos.tally("re-delivered")
            self._send(report)

    def _send(self, report: Report) -> None:
        """Until there is an answer: a lost one leaves open whether it was committed."""
        while not self.chaos.stopped:
            try:
                with self._call() as queue:
                    (answer,) = queue.report([report])
                    self.chaos.committed(report.ticket, answer)
            except QueueAway:
                self.chaos.sleep(0.02)
            else:
                return
