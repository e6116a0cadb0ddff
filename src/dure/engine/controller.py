"""The loop: hint + sweep. A change wakes it at once, the sweep makes a lost hint harmless."""

from __future__ import annotations

import threading

import msgspec
import structlog

from dure.core.events import Event, EventName
from dure.core.invariants import check_plan
from dure.core.lifecycle import JobEvent, step
from dure.core.model import ACTIVE, JobId, JobState, Phase
from dure.core.plan import Plan, Snapshot
from dure.core.retry import waited
from dure.core.scheduler import plan
from dure.engine.applier import apply
from dure.engine.borrowing import lend_a_slot
from dure.engine.engine import Engine
from dure.engine.reconciler import collect, reconcile, record_refusals
from dure.engine.work import Work, any_fit

log = structlog.get_logger("dure.controller")
_NEXT_PHASE = {
    Phase.DRAINING: Phase.BACKFILL_RECOVERY,
    Phase.BACKFILL_RECOVERY: Phase.ACTIVE,
}


class Controller:
    """Drives one engine: collect, let time pass, plan, apply."""

    def __init__(self, engine: Engine, sweep_s: float, remember_s: float = 86_400.0) -> None:
        self.engine = engine
        self.sweep_s = sweep_s
        self._remember_ms = round(remember_s * 1000)
        self._forgot_ms = 0
        self.last_snapshot: Snapshot | None = None
        self.last_plan: Plan | None = None
        self._cursors: dict[str, int] = {}
        self._pool_seen = -1
        self._sweep_due_ms = 0
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        engine.on_change(self._wake.set)

    # -- thread --

    def start(self) -> None:
        """Reconcile with the machines, then run until `stop`."""
        self.sweep()
        self._thread = threading.Thread(target=self._run, name="dure-controller", daemon=True)
        self._thread.start()

    @property
    def died(self) -> bool:
        """Whether the loop was started and is not alive any more."""
        return self._thread is not None and not self._thread.is_alive()

    def stop(self) -> None:
        """End the loop after the current turn."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            hinted = self._wake.wait(self._patience_s())
            self._wake.clear()
            try:
                # Hints that come without a pause must not keep the sweep away.
                if hinted and self.engine.clock.now_ms() < self._sweep_due_ms:
                    self.turn()
                else:
                    self.sweep()
            except Exception:
                # Loop top: whatever failed is tried again by the next sweep.
                log.exception("turn_failed")
                self._stop.wait(min(1.0, self.sweep_s))

    def _patience_s(self) -> float:
        """Until the next sweep, or until a delay in the index is over."""
        with self.engine.world.lock:
            due_ms = self.engine.world.index.next_due_ms()
        if due_ms is None:
            return self.sweep_s
        return max(0.0, min(self.sweep_s, (due_ms - self.engine.clock.now_ms()) / 1000))

    # -- one turn --

    def turn(self) -> int:
        """Take in what happened and dispatch until nothing more moves."""
        kept = 0
        while True:
            self.engine.catch_up()
            seen = collect(self.engine, self._cursors)
            done = self._cycle()
            kept += done
            if not done and not seen and not lend_a_slot(self.engine):
                self._advance_phase()
                return kept

    def sweep(self) -> int:
        """A turn that also looks at what no hint tells: intents, timers, lost fits."""
        self._sweep_due_ms = self.engine.clock.now_ms() + round(self.sweep_s * 1000)
        # The store may hold what no subscriber here was told of.
        self.engine.world.behind = True
        self.engine.catch_up()
        reconcile(self.engine)
        kept = self.turn()
        self._promote_due()
        self._forget()
        return kept + self.turn()

    def _cycle(self) -> int:
        """One dispatch cycle of policy 4; returns how many decisions were kept."""
        self._presence()
        world = self.engine.world
        with world.lock:
            world.index.advance(self.engine.clock.now_ms())
            world.cycle += 1
            snapshot = world.index.snapshot(world.pool, world.cycle, world.phase)
        made = plan(snapshot, self.engine.policy)
        broken = check_plan(snapshot, made)
        if broken:
            # Never applied: a plan that breaks an invariant is a bug, and costs GPUs.
            log.error("plan_refused", violations=[v.detail for v in broken])
            return 0
        self.last_snapshot, self.last_plan = snapshot, made
        applied = apply(self.engine, snapshot, made)
        record_refusals(self.engine, applied.refused)
        return applied.kept

    def _presence(self) -> None:
        """NODE_WAIT exactly while no fitting placement is in service (policy 2)."""
        world = self.engine.world
        with world.lock:
            away, back = world.index.presence_changes(world.pool)
        if not away and not back:
            return
        with self.engine.change("presence") as work:
            work.load([*away, *back])
            for job_id in away:
                self._move(work, job_id, JobEvent.NODE_ABSENT)
            for job_id in back:
                self._move(work, job_id, JobEvent.NODE_PRESENT)

    def _move(self, work: Work, job_id: JobId, event: JobEvent) -> None:
        job = work.job(job_id)
        expected = (
            JobState.GLOBAL_QUEUE_WAIT if event is JobEvent.NODE_ABSENT else JobState.NODE_WAIT
        )
        if job is None or job.state is not expected:
            return
        absent = event is JobEvent.NODE_ABSENT
        lost = absent and not any_fit(job, work.context)
        after = msgspec.structs.replace(
            waited(job, work.now_ms, self.engine.policy),
            state=step(job.state, event),
            fit_lost=lost,
        )
        if absent:
            after = msgspec.structs.replace(after, node_wait_since_ms=work.now_ms)
        work.put(after, EventName.JOB_NODE_WAIT if absent else EventName.JOB_NODE_BACK)
        if lost:
            work.tell(after, EventName.JOB_FIT_LOST)

    def _promote_due(self) -> None:
        """Personal queues whose jobs became promotable by time or by a returned fit."""
        engine = self.engine
        with engine.store.read() as tx:
            users = tx.users_with_personal_jobs()
        if not users or engine.world.phase is not Phase.NORMAL:
            return
        pool_changed = engine.world.pool.version != self._pool_seen
        self._pool_seen = engine.world.pool.version
        with engine.change("presence") as work:
            if pool_changed:
                for user in users:
                    for job in work.tx.personal_queue(user):
                        if job.fit_lost and any_fit(job, work.context):
                            found = msgspec.structs.replace(job, fit_lost=False)
                            work.put(found, EventName.JOB_EDITED)
            work.promote(users)

    def _forget(self) -> None:
        """Idempotency-Keys are remembered for a day, looked at once an hour."""
        now_ms = self.engine.clock.now_ms()
        if now_ms - self._forgot_ms >= 3_600_000:
            self._forgot_ms = now_ms
            with self.engine.store.write() as tx:
                tx.forget_replays(now_ms - self._remember_ms)

    def _advance_phase(self) -> None:
        """Maintenance goes on by itself when nothing runs (policy 8's `leaves` column)."""
        engine = self.engine
        if engine.world.phase not in _NEXT_PHASE:
            return
        with engine.store.read() as tx:
            # Looked at outside `change`, whose hint would call the next turn at once.
            running = any(j.state in ACTIVE for j in tx.live_jobs())
        if engine.world.phase is Phase.DRAINING and running:
            return
        with engine.change("admin") as work:
            # Read again: an administrator may have aborted meanwhile. No backfill yet: the
            # last replica is gone as soon as recovery begins.
            after = _NEXT_PHASE.get(work.tx.phase())
            if after is None:
                return
            work.tx.put_phase(after)
            work.emit(Event(name=EventName.MAINTENANCE_CHANGED, at_ms=work.now_ms, phase=after))
