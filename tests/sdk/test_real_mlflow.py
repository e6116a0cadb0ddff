"""What a real MLflow server (SQLite) holds after real runs."""

from __future__ import annotations

import json
import os
import time

import mlflow
import pytest

from dure_sdk import tracking
from tests.sdk.test_cgroup_trees import CPU_KEYS, KEYS, MIB, put, v2

NODE = (
    "node_cpu_utilization_percentage",
    "node_memory_usage_megabytes",
    "node_memory_usage_percentage",
    "rootfs_available_megabytes",
    "rootfs_usage_megabytes",
    "rootfs_usage_percentage",
)
NETWORK = ("network_receive_megabytes", "network_transmit_megabytes")
TRAIN = """
import json, time, mlflow
from dure_sdk import tracking
tracking.prepare_worker()
tracking.enable_system_metrics(all_workers=True, interval=0.3)
time.sleep(1)
tracking.end_run()
"""


def names(rank: int, node: str | None) -> set[str]:
    middle = f"/{node}" if node else ""
    return {
        *(f"system/{n}{middle}/rank{rank}" for n in NODE),
        *(f"system/{n}/rank{rank}" for n in NETWORK),
    }


@pytest.fixture(autouse=True)
def uncontained(monkeypatch, tmp_path):
    """No limit, whatever holds the tests: an empty tree of cgroups."""
    (tmp_path / "cgroups").mkdir()
    monkeypatch.setenv("DURE_CGROUP_ROOT", str(tmp_path / "cgroups"))


@pytest.fixture
def run(server):
    mlflow.set_tracking_uri(server.uri)
    return tracking.start_run()


def held(run_id: str) -> mlflow.entities.Run:
    return mlflow.MlflowClient().get_run(run_id)


def history(run_id: str, key: str):
    return mlflow.MlflowClient().get_metric_history(run_id, key)


def test_one_worker(run, monkeypatch):
    monkeypatch.setenv("NODE_NAME", "gpu-node-1")
    assert tracking.enable_system_metrics(interval=0.3)
    time.sleep(1)
    tracking.end_run()
    got = held(run.info.run_id)
    assert set(got.data.metrics) == names(0, "gpu-node-1")
    assert got.info.status == "FINISHED"
    tags = got.data.tags
    assert tags["dure.sysmetrics.rank0"] == "gpu-node-1"
    assert tags["dure.sysmetrics.interval_s"] == "0.3"
    assert tags["dure.sysmetrics.samples"] == "1"
    assert tags["dure.sysmetrics.collectors"] == "1"
    assert tags["dure.sysmetrics.deps"] == "image"
    assert "mlflow 3." in tags["dure.sysmetrics.versions"]
    assert "psutil" in tags["dure.sysmetrics.deps_paths"]


def test_unknown_node_is_said_in_the_tag_and_not_in_a_name(run):
    tracking.enable_system_metrics(interval=0.3)
    time.sleep(0.5)
    tracking.end_run()
    got = held(run.info.run_id)
    assert set(got.data.metrics) == names(0, None)
    assert got.data.tags["dure.sysmetrics.rank0"] == "unknown"


def test_short_run_has_its_first_and_last_sample_at_their_true_times(run):
    began_ms = time.time() * 1000
    tracking.enable_system_metrics(interval=10)
    time.sleep(3)
    stopped_ms = time.time() * 1000
    tracking.end_run()
    points = history(run.info.run_id, "system/node_memory_usage_percentage/rank0")
    assert [p.step for p in points] == [0, 1]
    assert points[0].timestamp - began_ms < 2500
    assert abs(points[1].timestamp - stopped_ms) < 1500


def test_first_cpu_reading_is_a_real_one(run):
    tracking.enable_system_metrics(interval=10)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        sum(range(1000))
    tracking.end_run()
    first, *_ = history(run.info.run_id, "system/node_cpu_utilization_percentage/rank0")
    # One core of this machine was busy: neither psutil's first 0.0 nor a mean with it.
    assert first.value >= 100 / os.cpu_count() * 0.5


def test_samples_of_one_point_are_averaged(run):
    tracking.enable_system_metrics(interval=0.2, samples=4)
    time.sleep(2.2)
    tracking.end_run()
    points = history(run.info.run_id, "system/node_memory_usage_megabytes/rank0")
    assert 3 <= len(points) <= 4  # the first, one or two means of four, the last
    assert [p.step for p in points] == list(range(len(points)))


def test_two_workers_in_one_pod_are_one_collector(server, run, python):
    pod = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_NAME": "n1"}
    pod |= {"MLFLOW_TRACKING_URI": server.uri, "DURE_MLFLOW_RUN_ID": run.info.run_id}
    ranks = [python(TRAIN, {**pod, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
    for rank in ranks:
        out = rank.communicate(timeout=60)[0]
        assert rank.returncode == 0, out
    got = held(run.info.run_id)
    assert set(got.data.metrics) == names(0, "n1")
    assert got.data.tags["dure.sysmetrics.collectors"] == "1"
    assert got.data.tags["dure.sysmetrics.rank1"] == "n1"
    assert got.info.status == "RUNNING"  # its end is the opener's


def test_two_pods_on_one_node_are_two_collectors(server, run, python):
    pod = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_NAME": "n1"}
    pod |= {"MLFLOW_TRACKING_URI": server.uri, "DURE_MLFLOW_RUN_ID": run.info.run_id}
    ranks = [python(TRAIN, {**pod, "RANK": str(r)}) for r in range(2)]
    for rank in ranks:
        out = rank.communicate(timeout=60)[0]
        assert rank.returncode == 0, out
    got = held(run.info.run_id)
    assert set(got.data.metrics) == names(0, "n1") | names(1, "n1")
    assert got.data.tags["dure.sysmetrics.collectors"] == "2"


def test_default_is_rank_0_alone(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not tracking.enable_system_metrics(interval=0.2)
    monkeypatch.setenv("RANK", "0")
    assert tracking.enable_system_metrics(interval=0.2)


def test_node_series_are_left_to_the_agent(run, monkeypatch):
    monkeypatch.setenv("NODE_NAME", "n1")
    monkeypatch.setenv("DURE_NODE_SERIES", "agent")
    tracking.enable_system_metrics(interval=0.3)
    time.sleep(0.6)
    tracking.end_run()
    assert set(held(run.info.run_id).data.metrics) == {f"system/{n}/rank0" for n in NETWORK}


def test_second_call_for_the_same_run_is_ignored(run, caplog):
    tracking.enable_system_metrics(interval=0.2)
    first = tracking._session
    assert tracking.enable_system_metrics(interval=0.2)
    assert tracking._session is first
    assert caplog.text.count("recorded already") == 1


def test_another_run_stops_the_first_monitor(run, server):
    tracking.enable_system_metrics(interval=0.2)
    first = tracking._session
    other = mlflow.start_run(nested=True)
    tracking.enable_system_metrics(interval=0.2)
    assert tracking._session is not first
    assert not first.alive
    assert tracking._session.run_id == other.info.run_id
    assert held(run.info.run_id).data.metrics  # flushed before the second began


def test_resumed_run_continues_its_step_and_only_its_own(run):
    run_id = run.info.run_id
    tracking.enable_system_metrics(interval=0.2)
    time.sleep(0.8)
    tracking.end_run()
    key = "system/node_memory_usage_megabytes/rank0"
    before = [p.step for p in history(run_id, key)]
    # A user's own metric below system/ and another rank's are not ours to continue.
    client = mlflow.MlflowClient()
    client.log_metric(run_id, "system/mine", 1, step=1_000_000)
    client.log_metric(run_id, "system/node_memory_usage_megabytes/rank7", 1, step=500)
    tracking.start_run(run_id=run_id)
    tracking.enable_system_metrics(interval=0.2)
    time.sleep(0.8)
    tracking.end_run()
    assert held(run_id).info.status == "FINISHED"  # who resumed it ends it
    after = sorted(p.step for p in history(run_id, key))
    assert len(after) > len(before)
    assert after == list(range(len(after)))


@pytest.mark.parametrize(("error", "status"), [(None, "FINISHED"), (KeyError, "FAILED")])
def test_with_statement_ends_in_order(server, error, status):
    mlflow.set_tracking_uri(server.uri)
    try:
        with tracking.start_run() as run:
            tracking.enable_system_metrics(interval=60)
            time.sleep(1)
            if error:
                raise error
    except KeyError:
        pass
    assert held(run.info.run_id).info.status == status
    assert len(history(run.info.run_id, "system/node_memory_usage_megabytes/rank0")) == 2


def test_rank_that_knows_no_run_opens_none(server, monkeypatch, caplog):
    mlflow.set_tracking_uri(server.uri)
    monkeypatch.setenv("RANK", "1")
    with tracking.start_run():
        assert mlflow.active_run() is None
        assert not tracking.enable_system_metrics(all_workers=True)
    assert caplog.text.count("was told no run") == 1


def test_run_ended_by_mlflow_alone_ends_the_monitor(run):
    tracking.enable_system_metrics(interval=60)
    session = tracking._session
    time.sleep(0.7)
    mlflow.end_run()
    end = time.monotonic() + 5
    while session.alive and time.monotonic() < end:
        time.sleep(0.05)
    assert not session.alive


def test_program_that_only_uses_mlflows_calls_keeps_its_last_sample(server, python):
    text = """
import mlflow, time
from dure_sdk import tracking
mlflow.start_run()
tracking.enable_system_metrics(interval=60)
time.sleep(1)
print("RUN", mlflow.active_run().info.run_id)
"""
    out = python(text, {"MLFLOW_TRACKING_URI": server.uri}).communicate(timeout=60)[0]
    mlflow.set_tracking_uri(server.uri)
    run_id = out.split("RUN ")[1].split()[0]
    assert len(history(run_id, "system/node_memory_usage_megabytes/rank0")) == 2
    assert held(run_id).info.status == "FINISHED"


def test_mlflows_switch_is_removed_and_told(server, monkeypatch, caplog):
    mlflow.set_tracking_uri(server.uri)
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    run_id = tracking.init_driver(run_name="driver")
    assert "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING" not in os.environ
    assert caplog.text.count("was removed from the environment") == 1
    assert tracking.worker_env()["DURE_MLFLOW_RUN_ID"] == run_id
    tracking.end_run()
    assert "DURE_MLFLOW_RUN_ID" not in os.environ
    assert not [k for k in held(run_id).data.metrics if k.startswith("system/")]


def test_order_of_the_end(run, monkeypatch):
    """Stop the monitor, flush, then end the run: asserted, since any other order loses samples."""
    tracking.enable_system_metrics(interval=0.3)
    session = tracking._session
    order = []

    def spy(thing, name):
        inner = getattr(thing, name)
        monkeypatch.setattr(thing, name, lambda *a, **k: (order.append(name), inner(*a, **k))[1])

    spy(session.monitor, "stop")
    spy(session.sender, "close")
    spy(mlflow, "end_run")
    time.sleep(0.4)
    tracking.end_run()
    assert order == ["stop", "close", "end_run"]
    assert session.sender.left == 0


def test_without_mlflow_or_run_the_call_is_silent(caplog, monkeypatch):
    assert not tracking.enable_system_metrics()
    monkeypatch.delitem(__import__("sys").modules, "mlflow")
    assert not tracking.enable_system_metrics()
    assert caplog.text == ""


def test_without_psutil_one_warning_and_a_tag(server, python, tmp_path):
    (tmp_path / "psutil.py").write_text("raise ImportError('not in this image')")
    text = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import mlflow
from dure_sdk import tracking
run = mlflow.start_run()
tracking.enable_system_metrics(interval=0.2)
import time; time.sleep(1)
tracking.end_run()
print("RUN", run.info.run_id)
"""
    out = python(text, {"MLFLOW_TRACKING_URI": server.uri}).communicate(timeout=60)[0]
    run_id = out.split("RUN ")[1].split()[0]
    mlflow.set_tracking_uri(server.uri)
    assert out.count("psutil is missing") == 1
    got = held(run_id)
    assert got.data.tags["dure.sysmetrics.skipped"].startswith("psutil is missing")
    assert not [k for k in got.data.metrics if k.startswith("system/")]


def test_users_async_logging_never_fails_because_of_us(server, python):
    """MLflow's shared queue cannot be used and shut down at once; ours never touches it."""
    text = """
import time, mlflow
from dure_sdk import tracking
mlflow.start_run()
tracking.enable_system_metrics(interval=0.05)
end, n = time.monotonic() + 5, 0
while time.monotonic() < end:
    mlflow.log_metric("loss", n, step=n)
    n += 1
    if n % 5 == 0:
        mlflow.flush_async_logging()
run = mlflow.active_run().info.run_id
tracking.end_run()
print("DONE", n, run)
"""
    env = {"MLFLOW_TRACKING_URI": server.uri, "MLFLOW_ENABLE_ASYNC_LOGGING": "true"}
    out = python(text, env).communicate(timeout=60)[0]
    assert "DONE" in out, out
    _, count, run_id = out[out.index("DONE") :].split()[:3]
    mlflow.set_tracking_uri(server.uri)
    assert len(history(run_id, "loss")) == int(count)
    assert len(history(run_id, "system/node_memory_usage_megabytes/rank0")) > 20


def test_run_without_a_single_sample_says_so(run, monkeypatch, caplog):
    from dure_sdk import collectors

    monkeypatch.setattr(collectors, "build", lambda *a, **k: collectors.Built([], None, None, ()))
    tracking.enable_system_metrics(interval=10)
    tracking.end_run()
    tags = held(run.info.run_id).data.tags
    assert tags["dure.warn.system_metrics_empty"] == "run < 10s"
    assert caplog.text.count("no system metrics were recorded") == 1


def test_last_words(run, monkeypatch, tmp_path):
    monkeypatch.setenv("JOB_OUTPUT_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("JOB_ID", "17")
    tracking.enable_system_metrics(interval=0.2)
    time.sleep(1)
    path = tmp_path / "out" / ".dure" / "last-words-rank0.json"
    said = json.loads(path.read_text())
    assert said["run_id"] == run.info.run_id
    assert said["rank"] == 0
    assert said["step"] == "17"
    assert abs(said["time_ms"] / 1000 - time.time()) < 3
    tracking.end_run()
    ended = json.loads(path.read_text())
    assert ended["points"] > said["points"]
    assert (said["ended"], ended["ended"]) == (False, True)


def test_container_series_and_the_tags_of_the_end(run, tmp_path):
    tree = tmp_path / "cgroups"
    v2(tree, 500 * MIB, "100000 100000", memory__peak=270 * MIB)
    tracking.enable_system_metrics(interval=0.3)
    time.sleep(1)
    put(tree, memory__events="oom 3\noom_kill 3")
    tracking.end_run()
    got = held(run.info.run_id)
    container = {k for k in got.data.metrics if "container" in k}
    assert container == {f"system/{k}/rank0" for k in KEYS | CPU_KEYS}
    tags = got.data.tags
    assert tags["dure.sysmetrics.oom_kill"] == "2"  # of this run; one was there before it
    assert tags["dure.sysmetrics.mem_peak_sampled_mb"] == "209.7"
    assert tags["dure.sysmetrics.mem_peak_mb"] == "283.1"


SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "NODE_NAME": "n1"}


@pytest.mark.parametrize("same_cgroup", [True, False])
def test_srun_ranks_show_only_what_the_first_of_their_node_cannot(
    server, run, python, tmp_path, same_cgroup
):
    trees = [v2(tmp_path / f"tree{i}", 500 * MIB) for i in range(2)]
    env = {**SRUN, "MLFLOW_TRACKING_URI": server.uri, "DURE_MLFLOW_RUN_ID": run.info.run_id}
    env["DURE_LAST_WORDS_DIR"] = str(tmp_path / "words")
    for rank in range(2):  # one after the other: the first one's words stay
        own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        own["DURE_CGROUP_ROOT"] = str(trees[0 if same_cgroup else rank])
        done = python(TRAIN, {**env, **own})
        out = done.communicate(timeout=60)[0]
        assert done.returncode == 0, out
    got = set(held(run.info.run_id).data.metrics)
    assert got >= names(0, "n1") | {f"system/{k}/rank0" for k in KEYS}
    second = {k for k in got if k.endswith("/rank1")}
    assert second == (set() if same_cgroup else {f"system/{k}/rank1" for k in KEYS})
