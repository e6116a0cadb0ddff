"""Everything undocumented in MLflow and psutil that the SDK leans on, in one place.

Run against the oldest supported, the current and the newest MLflow by `tools/mlflow_matrix.py`.
When one of these breaks, the design is looked at again; the test is not bent.
"""

from __future__ import annotations

import inspect
import os
import threading
import time

import mlflow
import psutil
import pytest
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import fluent
from mlflow.utils.rest_utils import http_request

from dure_sdk import mlflow_state
from dure_sdk.names import PREFIX
from dure_sdk.transport import BATCH_MAX, AwayError, HttpTransport, Metric, RefusedError
from tests.sdk.servers import Door, free_port

UPSTREAM_KEYS = {
    "cpu_utilization_percentage",
    "system_memory_usage_megabytes",
    "system_memory_usage_percentage",
    "disk_usage_percentage",
    "disk_usage_megabytes",
    "disk_available_megabytes",
    "network_receive_megabytes",
    "network_transmit_megabytes",
}


@pytest.fixture
def run(server):
    mlflow.set_tracking_uri(server.uri)
    return mlflow.MlflowClient().create_run("0")


@pytest.fixture
def transport(server, run):
    return HttpTransport(server.uri, run.info.run_id)


def metric(key: str, value: float = 1.0, ms: int = 1, step: int = 0) -> Metric:
    return Metric(key, value, ms, step)


@pytest.fixture
def monitor(server):
    return SystemMetricsMonitor("0" * 32, tracking_uri=server.uri)


def test_constructor():
    parameters = inspect.signature(SystemMetricsMonitor).parameters
    assert {n: p.default for n, p in parameters.items()} == {
        "run_id": inspect.Parameter.empty,
        "sampling_interval": 10,
        "samples_before_logging": 1,
        "resume_logging": False,
        "node_id": None,
        "tracking_uri": None,
    }


def test_constructor_starts_nothing_and_asks_no_server():
    before = set(threading.enumerate())
    began = time.monotonic()
    SystemMetricsMonitor("0" * 32, tracking_uri=f"http://127.0.0.1:{free_port()}")
    assert set(threading.enumerate()) == before
    assert time.monotonic() - began < 5


def test_collectors_are_a_list_of_the_known_form(monitor):
    assert type(monitor.monitors) is list
    kinds = [type(m).__name__ for m in monitor.monitors]
    assert kinds[:3] == ["CPUMonitor", "DiskMonitor", "NetworkMonitor"]
    assert set(kinds[3:]) <= {"GPUMonitor", "ROCMMonitor"}
    for one in monitor.monitors:
        one.collect_metrics()
        assert isinstance(one._metrics, dict)
        assert set(one.aggregate_metrics()) == set(one._metrics)
        one.clear_metrics()
        assert not one._metrics


def test_names_of_the_gpu_collectors():
    from mlflow.system_metrics.metrics import gpu_monitor, rocm_monitor

    assert gpu_monitor.GPUMonitor
    assert rocm_monitor.ROCMMonitor


def test_the_eight_keys(monitor):
    for one in monitor.monitors[:3]:
        one.collect_metrics()
    assert {k for one in monitor.monitors[:3] for k in one._metrics} == UPSTREAM_KEYS


def test_prefix_and_step(monitor):
    assert monitor._metrics_prefix == PREFIX
    assert monitor._logging_step == 0


def test_environment_wins_over_argument_and_a_bad_one_raises(monkeypatch, server):
    """Why the SDK reads the variables itself, and why it can do without the constructor."""
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "7")
    made = SystemMetricsMonitor("0" * 32, sampling_interval=3, tracking_uri=server.uri)
    assert made.sampling_interval == 7
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "abc")
    with pytest.raises(ValueError, match="abc"):
        SystemMetricsMonitor("0" * 32, tracking_uri=server.uri)


def test_psutil_counts_cpu_per_thread(monkeypatch):
    """The first reading of a thread is 0.0: priming in another thread primes nothing."""
    # A new thread may have the number of one that has ended, and its last reading.
    monkeypatch.setattr(psutil, "_last_cpu_times", {})
    psutil.cpu_percent()
    time.sleep(0.05)
    got: list[float] = []
    thread = threading.Thread(target=lambda: got.append(psutil.cpu_percent()))
    thread.start()
    thread.join()
    assert got == [0.0]


def test_request_function_takes_what_is_handed_to_it():
    names = set(inspect.signature(http_request).parameters)
    wanted = {"host_creds", "endpoint", "method", "max_retries", "backoff_factor", "timeout"}
    assert wanted | {"raise_on_status"} <= names


def test_no_retry_means_none(server, run):
    door = Door(server.port)
    try:
        transport = HttpTransport(door.uri, run.info.run_id)
        door.turn("busy")
        began = time.monotonic()
        with pytest.raises(AwayError, match="503"):
            transport.log([metric("a")], {}, 5)
        assert time.monotonic() - began < 2
        assert door.requests == 1
        door.turn("silent")
        began = time.monotonic()
        with pytest.raises(AwayError):
            transport.log([metric("a")], {}, 0.5)
        assert time.monotonic() - began < 2
        door.turn("refused")
        with pytest.raises(AwayError):
            transport.log([metric("a")], {}, 5)
    finally:
        door.close()


def test_batch_is_stored_with_its_times_and_steps(server, transport, run):
    transport.log([metric("system/a/rank0", 1.5, 77, 3)], {"t": "v"}, 5)
    client = mlflow.MlflowClient(server.uri)
    (point,) = client.get_metric_history(run.info.run_id, "system/a/rank0")
    assert (point.value, point.timestamp, point.step) == (1.5, 77, 3)
    assert client.get_run(run.info.run_id).data.tags["t"] == "v"
    assert transport.next_step("/rank0", 5) == 4
    assert transport.next_step("/rank1", 5) == 0


def test_same_point_twice_is_one_point(server, transport, run):
    """A request whose answer was lost can be sent again."""
    for _ in range(2):
        transport.log([metric("a", 1.0, 5, 1)], {}, 5)
    assert len(mlflow.MlflowClient(server.uri).get_metric_history(run.info.run_id, "a")) == 1


def test_ended_run_takes_late_samples(server, transport, run):
    transport.finish("FINISHED", 5)
    assert mlflow.MlflowClient(server.uri).get_run(run.info.run_id).info.status == "FINISHED"
    transport.log([metric("late")], {}, 5)


def test_deleted_and_unknown_runs_refuse(server, transport, run):
    mlflow.MlflowClient(server.uri).delete_run(run.info.run_id)
    with pytest.raises(RefusedError):
        transport.log([metric("a")], {}, 5)
    with pytest.raises(RefusedError) as refused:
        HttpTransport(server.uri, "0" * 32).log([metric("a")], {}, 5)
    assert refused.value.final


@pytest.mark.parametrize("bad", ["a@b", "a//b", "a/../b", "/a", "k" * 251])
def test_one_bad_name_costs_the_whole_batch(transport, bad):
    with pytest.raises(RefusedError):
        transport.log([metric("good"), metric(bad)], {}, 5)


def test_name_rules(transport):
    transport.log([metric("k" * 250), metric("system/a_b-c.d/node-1/rank0")], {}, 5)


def test_batch_limit(transport):
    transport.log([metric(f"m{i}") for i in range(BATCH_MAX)], {}, 30)
    with pytest.raises(RefusedError):
        transport.log([metric(f"m{i}") for i in range(BATCH_MAX + 1)], {}, 30)


def test_client_can_be_told_to_write_at_once():
    assert "synchronous" in inspect.signature(mlflow.MlflowClient.log_batch).parameters


def test_metrics_of_a_run_carry_their_step(server, transport, run):
    transport.log([metric("a", step=9)], {}, 5)
    data = mlflow.MlflowClient(server.uri).get_run(run.info.run_id).data
    assert [(m.key, m.step) for m in data._metric_objs] == [("a", 9)]


def test_open_runs_of_all_threads(server):
    mlflow.set_tracking_uri(server.uri)
    run_id = mlflow.start_run().info.run_id
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(mlflow_state.open_run_ids()))
    thread.start()
    thread.join()
    assert run_id in got[0]
    assert isinstance(fluent._active_run_stack.get(), list)
    assert mlflow_state.detach(run_id)
    assert mlflow.active_run() is None
    assert mlflow.MlflowClient().get_run(run_id).info.status == "RUNNING"


def test_end_by_mlflow_leaves_the_open_runs(server):
    mlflow.set_tracking_uri(server.uri)
    run_id = mlflow.start_run().info.run_id
    mlflow.end_run()
    assert run_id not in mlflow_state.open_run_ids()


def test_stock_monitors_are_found_by_run():
    assert isinstance(fluent.run_id_to_system_metrics_monitor, dict)


def test_mlflows_own_run_variable_is_taken_by_the_next_run(server, monkeypatch, run):
    """Why the driver's run id travels in a variable of ours."""
    mlflow.set_tracking_uri(server.uri)
    monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
    assert mlflow.start_run().info.run_id == run.info.run_id
    assert "MLFLOW_RUN_ID" not in os.environ


def test_error_codes_are_words():
    assert isinstance(MlflowException("x").error_code, str)
