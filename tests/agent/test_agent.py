"""The agent step by step, on the simulated machine and the fake queue."""

from __future__ import annotations

import subprocess
import threading
import time

import msgspec
import pytest

from dure.adapters.clock import SystemClock, SystemIds
from dure.adapters.compute.edge.payload import (
    INLINE_BYTES,
    decode_result,
    encode_order,
    encode_result,
)
from dure.adapters.compute.local.gpus import Found, Probe, Usage
from dure.adapters.compute.simulated import SimRun, SimulatedBackend
from dure.adapters.lease.memory import MemoryLeaseQueue
from dure.agent.agent import Agent, Times
from dure.agent.journal import Entry, Journal
from dure.agent.outputs import SharedRuns
from dure.agent.reading import Gauge, node_report
from dure.agent.unit import UNIT, bye_on_term, install, sleep_unit_text, unit_text
from dure.core.lease import Bye, NodeMark, QueueAway, SweepRule, Task, TaskStatus, Ticket
from dure.core.model import Evidence, Gpu, JobId, Node, NodeHealth
from dure.ports import LeaseKey
from tests.contract.backends import order

GPUS = tuple(Gpu(index=i, tier="RTX4090", simulated=True) for i in range(2))


class Away(MemoryLeaseQueue):
    """A queue that can be cut off."""

    away = False

    def _check(self) -> None:
        if self.away:
            raise QueueAway("cut off")

    def beat(self, report, leases):
        self._check()
        return super().beat(report, leases)

    def report(self, reports):
        self._check()
        return super().report(reports)

    def claim(self, node, lease_ids):
        self._check()
        return super().claim(node, lease_ids)

    def bye(self, node, kind, leases):
        self._check()
        return super().bye(node, kind, leases)


class Bench:
    def __init__(self, folder) -> None:
        self.folder = folder
        self.clock = SystemClock()
        self.queue = Away(self.clock)
        self.runs: dict[int, SimRun] = {}
        node = Node(name="n1", backend="simulated", gpus=GPUS)
        self.local = SimulatedBackend(self.clock, [node], lambda o: self.runs[o.key.job])
        self.open()

    def open(self, **more) -> None:
        self.journal = Journal(self.folder / "leases")
        times = Times(beat_s=0.05, early_beat_s=0.05, retry_s=0.01, stop_kill_s=0.3)
        self.agent = Agent(
            self.queue,
            self.local,
            self.journal,
            Gauge(lambda: Probe(problem="none")),
            self.clock,
            SystemIds(),
            times=times,
            **more,
        )

    def put(self, job: int, run: SimRun, epoch: int = 1, payload: bytes | None = None) -> None:
        self.runs[job] = run
        asked = payload if payload is not None else encode_order(order("runs", job, epoch))
        self.queue.enqueue([Task(job=JobId(job), epoch=epoch, node="n1", payload=asked)])
        self.agent._rang = True

    def view(self, job: int):
        return next((t for t in self.queue.changes(0).tasks if t.job == job), None)

    def turn_until(self, what) -> None:
        end = time.monotonic() + 5
        while not what():
            self.agent._try_turn()
            time.sleep(0.005)
            assert time.monotonic() < end, self.queue.changes(0)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_a_job_from_claim_to_freed(bench):
    bench.put(1, SimRun(run_ms=20, linger_ms=20, evidence=Evidence(exit_code=3)))
    bench.turn_until(lambda: bench.view(1).freed_ms)
    seen = bench.view(1)
    assert seen.status is TaskStatus.DONE
    assert decode_result(seen.result).evidence.exit_code == 3
    assert seen.started_ms <= seen.done_ms <= seen.freed_ms
    assert list(bench.journal) == []


def test_more_tasks_than_one_call_gives(bench):
    for job in range(1, 11):
        bench.put(job, SimRun(run_ms=10))
    bench.turn_until(lambda: all(bench.view(j).freed_ms for j in range(1, 11)))


def test_unreadable_and_refused_orders_are_given_back(bench):
    bench.put(1, SimRun(), payload=b"from the future")
    bench.put(2, SimRun(refuse="no such folder"))
    bench.turn_until(lambda: all(bench.view(j).freed_ms for j in (1, 2)))
    assert "update it" in bench.view(1).detail
    assert bench.view(2).detail == "no such folder"
    assert bench.view(2).status is TaskStatus.FAILED
    assert list(bench.journal) == []


def test_a_refusal_is_kept_while_the_queue_is_away(bench):
    bench.put(1, SimRun(refuse="no room"))
    (claim,) = bench.queue.claim("n1", ["a"])
    bench.agent._accept(claim)
    bench.queue.away = True
    bench.agent._try_turn()
    bench.queue.away = False
    bench.turn_until(lambda: bench.view(1).freed_ms)
    assert bench.view(1).detail == "no room"


def test_lease_whose_launch_was_cut_off_by_a_crash(bench):
    bench.put(1, SimRun(run_ms=10))
    bench.put(2, SimRun(), payload=b"from the future")
    for claim in bench.queue.claim("n1", ["a", "b"]):
        bench.journal.put(Entry(ticket=claim.ticket, payload=claim.payload))
    bench.open()
    bench.agent._relaunch()
    bench.turn_until(lambda: bench.view(1).freed_ms and bench.view(2).freed_ms)
    assert bench.view(1).status is TaskStatus.DONE
    assert bench.view(2).status is TaskStatus.FAILED


def test_a_full_disk_gives_the_task_back(bench, monkeypatch):
    def full(_entry):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.journal, "put", full)
    bench.put(1, SimRun())
    bench.turn_until(lambda: bench.view(1).freed_ms)
    assert "No space left" in bench.view(1).detail
    assert bench.local.launches == []


def test_what_happens_while_the_queue_is_away_is_told_later(bench):
    bench.put(1, SimRun(run_ms=50))
    bench.turn_until(lambda: bench.view(1).started_ms)
    bench.queue.away = True
    for _ in range(20):
        bench.agent._try_turn()
        time.sleep(0.01)
    assert bench.agent.away
    assert not bench.view(1).done_ms
    bench.queue.away = False
    bench.turn_until(lambda: bench.view(1).freed_ms)
    assert not bench.agent.away
    assert bench.view(1).status is TaskStatus.DONE


def test_pauses_grow_and_are_not_all_alike(bench):
    bench.queue.away = True
    pauses = [bench.agent._try_turn() for _ in range(14)]
    assert pauses[0] <= 0.01
    assert 20 < pauses[-1] <= 30
    assert len(set(pauses)) > 10


def test_restarted_agent_goes_on_where_it_was(bench):
    bench.put(1, SimRun(run_ms=300))
    bench.turn_until(lambda: bench.view(1).started_ms)
    bench.open()
    (entry,) = bench.journal
    assert (entry.ticket.job, entry.gpus) == (1, (0,))
    bench.agent._relaunch()
    bench.turn_until(lambda: bench.view(1).freed_ms)
    assert bench.view(1).status is TaskStatus.DONE
    assert len(bench.local.launches) == 1


def test_lost_lease_is_stopped_and_says_nothing(bench):
    """Also when the job saves and exits 0: that is no result."""
    bench.put(1, SimRun(run_ms=60_000, save_ms=20))
    bench.turn_until(lambda: bench.view(1).started_ms)
    bench.queue.mark([NodeMark(node="n1", state=NodeHealth.STABLE, ready=True)])
    bench.queue._board.lines.beats.clear()
    run_id = bench.queue.sweep(SweepRule()).run_id
    assert len(bench.queue.sweep(SweepRule(run_id=run_id)).expired) == 1
    bench.turn_until(lambda: bench.view(1).freed_ms)
    assert bench.view(1).status is TaskStatus.FAILED
    assert bench.view(1).result == b""
    assert list(bench.journal) == []


def test_gpus_of_a_lost_lease_are_not_free_yet(bench):
    bench.put(1, SimRun(run_ms=60_000, save_ms=60_000))
    bench.turn_until(lambda: bench.view(1).started_ms)
    bench.queue.fence([LeaseKey(job=JobId(1), epoch=1)])
    bench.turn_until(lambda: any(e.lost for e in bench.journal))
    bench.agent._beat()
    (node,) = bench.queue.nodes().nodes
    assert [g["foreign"] for g in gpus(node)] == [True, False]
    bench.turn_until(lambda: not list(bench.journal))
    bench.agent._beat()
    (node,) = bench.queue.nodes().nodes
    assert not any(g.get("foreign") for g in gpus(node))


def gpus(node) -> list[dict]:
    return [{"foreign": False, **g} for g in msgspec.json.decode(node.report.gpus)]


@pytest.mark.parametrize("kind", Bye)
def test_leaving(bench, kind):
    bench.put(1, SimRun(run_ms=60_000, save_ms=20))
    thread = threading.Thread(target=bench.agent.run)
    thread.start()
    end = time.monotonic() + 5
    while not bench.view(1).started_ms and time.monotonic() < end:
        time.sleep(0.01)
    bench.agent.stop(kind)
    bench.agent.stop(Bye.OFF)
    thread.join(5)
    assert not thread.is_alive()
    seen, (node,) = bench.view(1), bench.queue.nodes().nodes
    assert node.bye is kind
    if kind is Bye.OFF:
        assert (seen.status, seen.returned, bool(seen.freed_ms)) == (
            TaskStatus.NODE_WAIT,
            True,
            True,
        )
        assert list(bench.journal) == []
    else:
        assert seen.status is TaskStatus.RUNNING
        assert len(list(bench.journal)) == 1


def test_leaving_while_the_queue_is_away_does_not_hang(bench):
    bench.put(1, SimRun(run_ms=60_000))
    bench.turn_until(lambda: bench.view(1).started_ms)
    bench.queue.away = True
    begun = time.monotonic()
    bench.agent._leave(Bye.OFF)
    assert time.monotonic() - begun < 1
    (entry,) = bench.journal
    assert entry.lost, "told when it comes back"


def test_broken_lease_files_are_left_out(tmp_path):
    journal = Journal(tmp_path)
    ticket = Ticket(job=JobId(1), epoch=1, lease_id="a")
    journal.put(Entry(ticket=ticket, payload=b"x"))
    (tmp_path / "2-1.json").write_text("{half")
    assert [e.ticket for e in Journal(tmp_path)] == [ticket]
    assert (tmp_path / "1-1.json").stat().st_mode & 0o077 == 0
    journal.strike(LeaseKey(job=JobId(1), epoch=1))
    assert list(Journal(tmp_path)) == []


def test_long_logs_keep_their_end():
    log = b"line\n" * 200_000
    result = encode_result(Evidence(exit_code=0), log[-INLINE_BYTES:], len(log))
    assert len(result) <= INLINE_BYTES
    back = decode_result(result)
    assert log.endswith(back.log)
    assert back.log_cut + len(back.log) == len(log)
    assert "unreadable" in decode_result(b"junk").evidence.stderr_tail


def test_readings_are_counted_and_the_best_gpu_is_shown():
    use = (Usage(pid=1, mib=20_000),)
    found = (
        Found(index=0, name="A", mib=24_000, processes=use, utilisation=90),
        Found(index=1, name="B", mib=12_000, utilisation=5),
    )
    gauge = Gauge(lambda: Probe(gpus=found))
    gauge()
    gauge()
    node = Node(name="n1", backend="x", gpus=GPUS, cores=8)
    report = node_report(node, gauge, busy={0})
    assert (report.sample, report.free_vram_mib, report.utilisation) == (2, 12_000, 5)
    assert report.good
    assert not node_report(node, gauge, busy={0, 1}).good
    assert not node_report(Node(name="n1", backend="x"), gauge).good


def test_outputs_of_another_node_are_linked(tmp_path):
    shared = SharedRuns(tmp_path, "b")
    (tmp_path / "a" / "7" / "2" / "out").mkdir(parents=True)
    (tmp_path / "a" / "7" / "2" / "out" / "ckpt").write_text("step 5")
    wanted = order("runs", 7, 3, copy_from_epoch=2)
    shared.link_earlier(wanted)
    shared.link_earlier(wanted)
    assert (tmp_path / "b" / "7" / "2" / "out" / "ckpt").read_text() == "step 5"
    (tmp_path / "b" / "8" / "1" / "out").mkdir(parents=True)
    shared.link_earlier(order("runs", 8, 2, copy_from_epoch=1))
    assert not (tmp_path / "b" / "8" / "1").is_symlink()


def test_units_are_what_systemd_reads(tmp_path):
    paths = install(tmp_path, "/opt/dure/bin/dure agent run", "dure")
    assert [p.name for p in paths] == [UNIT, "dure-agent-sleep.service"]
    text = unit_text("/opt/dure/bin/dure agent run", "dure")
    assert paths[0].read_text() == text
    for line in ("KillMode=process", "User=dure", "Restart=always", "TimeoutStopSec=45"):
        assert line in text.splitlines()
    assert "Before=sleep.target" in sleep_unit_text()


def test_sigterm_means_off_unless_systemd_restarts_the_unit():
    listed = "  412 other.service restart running\n  413 {unit} {kind} running\n"
    assert bye_on_term(listed.format(unit=UNIT, kind="restart")) is Bye.RESTART
    assert bye_on_term(listed.format(unit=UNIT, kind="stop")) is Bye.OFF
    assert bye_on_term("No jobs running.") is Bye.OFF
    assert bye_on_term() is Bye.OFF


def test_command_line(tmp_path):
    import sys
    from pathlib import Path

    dure = Path(sys.executable).with_name("dure")
    without = subprocess.run(
        [dure, "agent", "run"], capture_output=True, text=True, check=False, env={"PATH": ""}
    )
    assert without.returncode == 2
    assert "edge.redis_url" in without.stderr
    config = tmp_path / "dure.toml"
    config.write_text('[edge]\nredis_url = "redis://127.0.0.1:1/0"\n')
    folder = tmp_path / "units"
    folder.mkdir()
    argv = [dure, "agent", "install", "--config", config, "--user", "kim", "--folder", folder]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "systemctl" in done.stdout
    text = (folder / UNIT).read_text()
    assert f"ExecStart={dure} agent run --config {config}" in text
