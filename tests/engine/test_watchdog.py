"""The watchdog over the fake queue, tick by tick; and the probes against real sockets."""

from __future__ import annotations

import shutil
import socket
import time
from concurrent.futures import Future

import pytest

from dure.adapters.clock import ManualClock
from dure.adapters.lease.memory import MemoryLeaseQueue
from dure.adapters.probe import CommandProbe, HttpProbe, TcpProbe, missing_program, prober, split
from dure.agent.answer import HealthAnswer
from dure.core.health import Detection, HealthRule, Signal
from dure.core.lease import Bye, LeaseBeat, NodeReport, QueueAway, Task, TaskStatus
from dure.core.model import JobId, NodeHealth, NodeId
from dure.engine.watchdog import Watchdog

N1 = NodeId("n1")


class Here:
    """Probes answer at once, as they were told to."""

    def __init__(self) -> None:
        self.answer = Signal.PROBE_FAILED
        self.asked: list[str] = []

    def probe(self, address: str) -> Signal:
        self.asked.append(address)
        return self.answer


class AtOnce:
    def submit(self, call, *args):
        done: Future[Signal] = Future()
        done.set_result(call(*args))
        return done

    def shutdown(self, **_):
        """Nothing runs."""


class Fickle(MemoryLeaseQueue):
    away = False

    def nodes(self):
        if self.away:
            raise QueueAway("no answer")
        return super().nodes()


class Day:
    def __init__(self, rule: HealthRule | None = None) -> None:
        self.clock = ManualClock()
        self.queue = Fickle(self.clock, ttl_s=90)
        self.prober = Here()
        self.changes = 0
        self.rule = rule or HealthRule()
        self.leases = []
        self.sample = 0
        self.open()

    def open(self) -> None:
        self.watchdog = Watchdog(
            self.queue, self.prober, self.clock, self.rule, on_change=self.changed
        )
        self.watchdog._pool.shutdown()
        self.watchdog._pool = AtOnce()

    def changed(self) -> None:
        self.changes += 1

    def beat(self) -> None:
        self.sample += 1
        report = NodeReport(node=N1, sample=self.sample, address="n1:8471")
        beats = [LeaseBeat(ticket=t, started_age_ms=0) for t in self.leases]
        self.queue.beat(report, beats)

    def run(self, seconds: int, beat_s: int = 0) -> None:
        for second in range(seconds):
            self.clock.advance(1)
            if beat_s and second % beat_s == 0:
                self.beat()
            self.watchdog.tick()

    def up(self) -> None:
        self.beat()
        self.run(16, beat_s=5)
        assert self.node.state is NodeHealth.STABLE
        assert self.node.ready

    def job(self, number: int = 1, **more) -> None:
        task = Task(job=JobId(number), epoch=1, node=N1, payload=b"", **more)
        self.queue.enqueue([task])
        self.leases += [c.ticket for c in self.queue.claim(N1, [f"lease{number}"])]
        self.beat()

    @property
    def node(self):
        return self.queue.nodes().nodes[0]

    def status(self, number: int = 1) -> TaskStatus:
        return next(t.status for t in self.queue.changes(0).tasks if t.job == number)


def test_a_node_comes_and_goes():
    day = Day()
    day.up()
    before = day.changes
    day.run(60, beat_s=15)
    assert (day.prober.asked, day.changes) == ([], before)
    day.run(40)
    assert day.node.state is NodeHealth.OFFLINE
    assert day.prober.asked == ["n1:8471"] * 4
    assert day.changes > before
    day.up()


def test_leases_are_not_judged_before_one_ttl():
    day = Day()
    day.job()
    day.queue.restart()
    day.up()
    day.leases.clear()
    day.queue._board.lines.beats.clear()
    day.run(70, beat_s=15)
    assert day.status() is TaskStatus.RUNNING
    day.run(30, beat_s=15)
    assert day.status() is TaskStatus.FAILED


def test_queue_away_is_doubt_not_death():
    day = Day()
    day.job()
    day.up()
    day.run(100, beat_s=15)
    day.queue.away = True
    day.run(300)
    day.queue.away = False
    day.queue._board.lines.beats.clear()
    day.run(10)  # the node is not connected again yet
    day.run(80, beat_s=15)
    assert day.node.state is NodeHealth.STABLE
    assert day.status() is TaskStatus.RUNNING, "beaten for again within the TTL"


@pytest.mark.parametrize("by_s", [3600, -3600])
def test_a_clock_that_is_set_fails_nothing(by_s):
    day = Day()
    day.job()
    day.up()
    day.run(100, beat_s=15)
    real = day.clock.now_ms
    skew = ManualClock(real())
    day.watchdog._clock = skew  # the control plane's clock parts from the queue's
    skew.set_ms(real() + by_s * 1000)
    day.leases.clear()
    day.queue._board.lines.beats.clear()
    for _ in range(80):
        day.clock.advance(1)
        skew.advance(1)
        day.watchdog.tick()
    assert day.status() is TaskStatus.RUNNING


def test_mass_silence_waits_one_more_ttl():
    day = Day()
    for number in range(1, 5):
        day.job(number)
    day.up()
    day.run(100, beat_s=15)
    day.leases.clear()
    day.run(170, beat_s=15)
    assert {day.status(n) for n in range(1, 5)} == {TaskStatus.RUNNING}
    day.run(20, beat_s=15)
    assert {day.status(n) for n in range(1, 5)} == {TaskStatus.FAILED}


def test_what_was_marked_survives_a_new_watchdog():
    day = Day()
    day.up()
    day.run(40)
    day.open()
    day.run(5)
    assert day.node.state is NodeHealth.OFFLINE
    day.up()
    day.queue.bye(N1, Bye.OFF, [])
    day.open()
    day.run(1)
    assert day.node.state is NodeHealth.OFFLINE


def test_polling_asks_every_node():
    day = Day(HealthRule(detection=Detection.POLLING))
    day.prober.answer = Signal.PROBE_OK
    day.beat()
    day.run(120, beat_s=15)
    assert day.node.state is NodeHealth.STABLE
    assert 4 <= len(day.prober.asked) <= 15


def test_removed_nodes_are_forgotten():
    day = Day()
    day.up()
    day.queue.forget(N1)
    day.run(1)
    assert day.watchdog._watched == {}


def test_a_look_that_fails_does_not_end_the_watch():
    day = Day()
    day.beat()
    failures = []

    class Broken(Here):
        def probe(self, address: str) -> Signal:
            failures.append(address)
            raise RuntimeError("a bug")

    rule = HealthRule(beat_s=0.01, overdue_s=0.01, burst_s=(0.0, 0.01))
    watchdog = Watchdog(day.queue, Broken(), day.clock, rule, tick_s=0.01)
    watchdog.start()
    end = time.monotonic() + 15
    while len(failures) < 2 and time.monotonic() < end:
        day.clock.advance(1)
        time.sleep(0.01)
    watchdog.close()
    assert len(failures) >= 2


# -- probes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("n1:8471", ("n1", 8471)),
        ("[fd7a::1]:8471", ("fd7a::1", 8471)),
        ("fd7a::1", ("fd7a::1", 0)),
        ("n1", ("n1", 0)),
        ("", ("", 0)),
    ],
)
def test_addresses(address, parts):
    assert split(address) == parts


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_http_and_tcp_tell_living_refused_and_silent_apart():
    answer = HealthAnswer("127.0.0.1", 0, lambda: {"node": "n1"})
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen()
    try:
        for probe in (HttpProbe(1), TcpProbe(1)):
            assert probe.probe(f"127.0.0.1:{answer.port}") is Signal.PROBE_OK
            assert probe.probe(f"127.0.0.1:{closed_port()}") is Signal.PROBE_REFUSED
            assert probe.probe("no-such-host.invalid:1") is Signal.PROBE_FAILED
            assert probe.probe("") is Signal.PROBE_FAILED
        begun = time.monotonic()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert HttpProbe(0.3).probe(address) is Signal.PROBE_FAILED
        assert time.monotonic() - begun < 2
    finally:
        silent.close()
        answer.close()


def test_commands_get_the_host_as_one_argument():
    assert CommandProbe(["test", "{host}", "=", "n1"]).probe("n1:1") is Signal.PROBE_OK
    assert CommandProbe(["test", "{host}", "=", "n1"]).probe("n2:1") is Signal.PROBE_FAILED
    assert CommandProbe(["true", "{host}"]).probe("-f:1") is Signal.PROBE_FAILED
    assert CommandProbe(["no-such-program"]).probe("n1:1") is Signal.PROBE_FAILED
    begun = time.monotonic()
    assert CommandProbe(["sleep", "20"], 0.1).probe("n1:1") is Signal.PROBE_FAILED
    assert time.monotonic() - begun < 5


@pytest.mark.skipif(shutil.which("ping") is None, reason="ping is not installed")
def test_icmp():
    assert prober("icmp").probe("127.0.0.1:1") is Signal.PROBE_OK


def test_settings_name_their_probe():
    assert isinstance(prober("http"), HttpProbe)
    assert isinstance(prober("tcp"), TcpProbe)
    assert "tailscale" in prober("tailscale")._argv
    assert missing_program("http") == ""
