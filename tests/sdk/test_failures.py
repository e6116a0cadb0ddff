"""A server that fails in every way never stops training and costs no sample."""

from __future__ import annotations

import itertools
import threading
import time

import mlflow
import pytest

from dure_sdk import tracking
from dure_sdk.notices import Causes
from dure_sdk.sender import Pace, Sample, Sender
from dure_sdk.transport import AwayError, HttpTransport, RefusedError

KEY = "system/node_memory_usage_megabytes/rank0"
FAST = Pace(send_every_s=0.1, timeout_s=0.5, retry_s=0.05, retry_max_s=0.2, last_try_s=1.0)


@pytest.fixture
def run(door):
    mlflow.set_tracking_uri(door.uri)
    return tracking.start_run()


def history(server, run_id):
    return mlflow.MlflowClient(server.uri).get_metric_history(run_id, KEY)


@pytest.mark.parametrize("mode", ["refused", "busy", "silent"])
def test_end_is_bounded_when_the_server_is_away(mode, run, door, server, caplog):
    tracking.enable_system_metrics(interval=0.3)
    time.sleep(1)
    door.turn(mode)
    time.sleep(0.5)
    began = time.monotonic()
    tracking.end_run()
    assert time.monotonic() - began < 8
    assert mlflow.active_run() is None
    assert "could not be sent" in caplog.text
    assert f"run {run.info.run_id} stays open" in caplog.text
    assert mlflow.MlflowClient(server.uri).get_run(run.info.run_id).info.status == "RUNNING"


@pytest.mark.parametrize("mode", ["refused", "busy", "silent"])
def test_no_sample_is_missing_after_an_outage(mode, run, door, server, caplog):
    tracking.enable_system_metrics(interval=0.2)
    session = tracking._session
    time.sleep(0.6)
    door.turn(mode)
    time.sleep(3)
    door.turn("open")
    time.sleep(0.5)
    tracking.end_run()
    points = history(server, run.info.run_id)
    assert [p.step for p in points] == list(range(session.monitor.points))
    stamps = [p.timestamp for p in points]
    # True times of sampling: the gap of the outage is not in them.
    assert max(b - a for a, b in itertools.pairwise(stamps)) < 1500
    assert stamps == sorted(stamps)
    assert caplog.text.count("samples are kept and sent later") <= 1
    assert caplog.text.count("answers again") == caplog.text.count("kept and sent later")
    assert mlflow.MlflowClient(server.uri).get_run(run.info.run_id).info.status == "FINISHED"


def test_server_that_is_away_from_the_start(run, door, server):
    door.turn("refused")
    tracking.enable_system_metrics(interval=0.2)
    time.sleep(1.5)
    door.turn("open")
    tracking.end_run()
    points = history(server, run.info.run_id)
    assert len(points) >= 5
    assert [p.step for p in points] == list(range(len(points)))


def test_worker_that_starts_while_the_server_is_away_records_all_the_same(run, door, server):
    run_id = run.info.run_id
    tracking.end_run()
    door.turn("refused")
    began = time.monotonic()
    assert tracking.prepare_worker(run_id) == run_id
    assert tracking.enable_system_metrics(interval=0.2)
    assert time.monotonic() - began < 3
    time.sleep(1)
    door.turn("open")
    tracking.end_run()
    assert len(history(server, run_id)) >= 3


def test_ten_minutes_at_ten_seconds_in_scaled_time(run, door, server):
    """60 intervals of outage; only the unit is a fiftieth of a second and not ten of them."""
    sender = Sender(HttpTransport(door.uri, run.info.run_id), "/rank0", Causes(), FAST)
    sender.start()
    door.turn("silent")
    for step in range(60):
        sender.put(Sample(1_000_000 + step * 10_000, step, {KEY: float(step)}))
        time.sleep(0.02)
    assert sender.left == 60
    door.turn("open")
    assert sender.close(10)
    points = history(server, run.info.run_id)
    assert [(p.step, p.value) for p in points] == [(s, float(s)) for s in range(60)]
    assert [p.timestamp for p in points] == [1_000_000 + s * 10_000 for s in range(60)]


def test_run_that_is_gone_stops_the_sender_with_one_word(run, door, server, caplog):
    transport = HttpTransport(door.uri, "0" * 32)
    sender = Sender(transport, "/rank0", Causes(), FAST)
    sender.start()
    sender.put(Sample(1, 0, {KEY: 1.0}))
    sender.put(Sample(2, 1, {KEY: 1.0}))
    began = time.monotonic()
    sender.close(5)
    assert time.monotonic() - began < 3
    assert caplog.text.count("takes no more system metrics") == 1


class Fake:
    """A transport whose answers are told beforehand."""

    def __init__(self, answers=(), slow_s=0.0):
        self.answers = list(answers)
        self.slow_s = slow_s
        self.got: list[tuple[list, dict]] = []
        self.release = threading.Event()

    def next_step(self, suffix, timeout_s):
        return 0

    def log(self, metrics, tags, timeout_s):
        time.sleep(self.slow_s)
        if self.answers:
            answer = self.answers.pop(0)
            if answer is not None:
                raise answer
        self.got.append((metrics, dict(tags)))


def sample(step: int, series: int = 1) -> Sample:
    return Sample(step, step, {f"k{i}": 0.0 for i in range(series)})


def test_full_buffer_thins_and_keeps_both_ends():
    fake = Fake([AwayError("x")] * 100_000)
    sender = Sender(fake, "/rank0", Causes(), FAST._replace(samples_max=100))
    sender.start()
    for step in range(1000):
        sender.put(sample(step))
    assert sender.left <= 100
    fake.answers.clear()
    assert sender.close(5)
    steps = [m.step for metrics, _ in fake.got for m in metrics]
    assert (steps[0], steps[-1]) == (0, 999)
    assert steps == sorted(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) < 200  # no hole in the middle
    assert sender.dropped == 1000 - len(steps)


def test_batches_stay_within_mlflows_limit():
    fake = Fake()
    sender = Sender(fake, "/rank0", Causes(), FAST)
    for step in range(100):
        sender.put(sample(step, 30))
    sender.start()
    assert sender.close(5)
    assert [len(m) for m, _ in fake.got] == [990, 990, 990, 30]


def test_tags_that_are_refused_cost_no_sample():
    fake = Fake([RefusedError("bad tag")])
    sender = Sender(fake, "/rank0", Causes(), FAST)
    sender.tag({"t": "v"})
    sender.put(sample(0))
    sender.start()
    assert sender.close(5)
    assert [(len(m), t) for m, t in fake.got] == [(1, {})]
    assert sender.tags_lost == 1


def test_refused_batch_is_dropped_and_the_next_ones_go_on(caplog):
    fake = Fake([RefusedError("bad key")])
    sender = Sender(fake, "/rank0", Causes(), FAST)
    sender.put(sample(0))
    sender.start()
    time.sleep(0.3)
    sender.put(sample(1))
    assert sender.close(5)
    assert [m.step for metrics, _ in fake.got for m in metrics] == [1]
    assert sender.dropped == 1
    assert caplog.text.count("refused a batch") == 1


def test_any_other_error_is_told_once_and_tried_again(caplog):
    fake = Fake([ZeroDivisionError("surprise")] * 3)
    sender = Sender(fake, "/rank0", Causes(), FAST)
    sender.put(sample(0))
    sender.start()
    time.sleep(0.5)
    assert sender.close(5)
    assert len(fake.got) == 1
    assert caplog.text.count("surprise") == 1


def test_close_gives_up_only_where_nothing_moves():
    fake = Fake(slow_s=0.4)  # slow, but alive: 5 batches of 0.4 s outlast `last_try_s`
    sender = Sender(fake, "/rank0", Causes(), FAST)
    for step in range(5):
        sender.put(sample(step, 900))
    sender.start()
    assert sender.close(10)
    assert len(fake.got) == 5


def test_close_is_bounded_by_its_limit():
    fake = Fake(slow_s=0.3)
    sender = Sender(fake, "/rank0", Causes(), FAST)
    for step in range(50):
        sender.put(sample(step, 900))
    sender.start()
    began = time.monotonic()
    assert not sender.close(1)
    assert time.monotonic() - began < 2


def test_putting_never_waits_for_the_server():
    fake = Fake(slow_s=5)
    sender = Sender(fake, "/rank0", Causes(), FAST)
    sender.start()
    sender.put(sample(0))
    time.sleep(0.2)
    began = time.monotonic()
    for step in range(1, 100):
        sender.put(sample(step))
    assert time.monotonic() - began < 0.5


def test_close_samples_travel_together():
    fake = Fake()
    sender = Sender(fake, "/rank0", Causes(), FAST._replace(send_every_s=0.5))
    sender.start()
    for step in range(20):
        sender.put(sample(step))
        time.sleep(0.05)
    assert sender.close(5)
    assert len(fake.got) <= 5
    assert sum(len(m) for m, _ in fake.got) == 20
