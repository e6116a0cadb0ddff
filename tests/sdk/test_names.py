"""Names, ranks and intervals: pure rules."""

from __future__ import annotations

import sys
import types

import pytest

from dure_sdk.names import NODE_MAX, Renamed, renamer, safe_node, scoped
from dure_sdk.ranks import Rank, current
from dure_sdk.timing import floor, timing

UPSTREAM = {
    "cpu_utilization_percentage": "node_cpu_utilization_percentage",
    "system_memory_usage_megabytes": "node_memory_usage_megabytes",
    "system_memory_usage_percentage": "node_memory_usage_percentage",
    "disk_usage_percentage": "rootfs_usage_percentage",
    "disk_usage_megabytes": "rootfs_usage_megabytes",
    "disk_available_megabytes": "rootfs_available_megabytes",
    "network_receive_megabytes": "network_receive_megabytes",
    "network_transmit_megabytes": "network_transmit_megabytes",
    "gpu_0_power_usage_watts": "gpu_0_power_usage_watts",
    # What MLflow may add tomorrow.
    "cpu_temperature_celsius": "node_cpu_temperature_celsius",
    "disk_read_megabytes": "rootfs_read_megabytes",
    "system_memory_swap_megabytes": "node_memory_swap_megabytes",
}


@pytest.mark.parametrize(("key", "name"), UPSTREAM.items())
def test_scope_stands_in_the_name(key, name):
    assert scoped(key) == name


def test_node_segment_only_where_the_node_is_measured():
    rename = renamer(3, "gpu-node-1")
    assert (
        rename("cpu_utilization_percentage") == "node_cpu_utilization_percentage/gpu-node-1/rank3"
    )
    assert rename("disk_usage_percentage") == "rootfs_usage_percentage/gpu-node-1/rank3"
    assert rename("gpu_1_utilization_percentage") == "gpu_1_utilization_percentage/rank3"
    assert rename("container_memory_usage_megabytes") == "container_memory_usage_megabytes/rank3"


def test_unknown_node_leaves_no_segment():
    assert renamer(0, None)("cpu_x") == "node_cpu_x/rank0"


def test_agent_owns_the_node_series():
    rename = renamer(1, "n", node_series=False)
    assert rename("cpu_utilization_percentage") is None
    assert rename("disk_usage_megabytes") is None
    assert rename("network_receive_megabytes") == "network_receive_megabytes/rank1"


@pytest.mark.parametrize(
    ("given", "safe"),
    [
        ("gpu-node-1", "gpu-node-1"),
        ("node@lab", "node-lab"),
        ("a//b", "a-b"),
        ("a..b", "a.b"),
        ("../etc", "etc"),
        (" ", None),
        ("", None),
        (None, None),
        ("서버 1", "1"),
        ("..", None),
    ],
)
def test_node_names_are_made_safe(given, safe):
    assert safe_node(given) == safe


def test_long_node_names_stay_short_and_distinct():
    one, two = (safe_node("n" * 252 + end) for end in "ab")
    assert one != two
    assert len(one) <= NODE_MAX
    longest = "system/" + renamer(99999, one)("system_memory_usage_percentage")
    assert len(longest) < 250


class Collector:
    def __init__(self):
        self._metrics = {}

    def collect_metrics(self):
        self._metrics = {"cpu_a": [1.0, 3.0], "gpu_0_b": [5.0]}

    def aggregate_metrics(self):
        return {k: sum(v) / len(v) for k, v in self._metrics.items()}

    def clear_metrics(self):
        self._metrics = {}


def test_proxy_renames_both_views_and_passes_the_rest_on():
    inner = Collector()
    proxy = Renamed(inner, renamer(0, "n"))
    proxy.collect_metrics()
    assert proxy._metrics == {"node_cpu_a/n/rank0": [1.0, 3.0], "gpu_0_b/rank0": [5.0]}
    assert proxy.aggregate_metrics() == {"node_cpu_a/n/rank0": 2.0, "gpu_0_b/rank0": 5.0}
    proxy.clear_metrics()
    assert inner._metrics == {}
    assert proxy.name == "Collector"


TORCH = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({}, Rank(0, 1, 0, 1, "single")),
        (TORCH, Rank(5, 8, 1, 4, "torchrun")),
        (SRUN, Rank(3, 4, 1, 2, "slurm")),
        ({**SRUN, **TORCH}, Rank(5, 8, 1, 4, "torchrun")),
        ({"RANK": "2", "WORLD_SIZE": "4"}, Rank(2, 4, None, None, "torchrun")),
        ({"RANK": "x"}, Rank(0, 1, 0, 1, "single")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,1"}, Rank(3, 4, 1, None, "slurm")),
    ],
)
def test_rank_truth(env, rank):
    assert current(env) == rank


def ray_train(monkeypatch, get_context):
    module = types.ModuleType("ray.train")
    module.get_context = get_context
    monkeypatch.setitem(sys.modules, "ray.train", module)


def test_ray_train_wins_over_the_environment(monkeypatch):
    class Context:
        get_world_rank = staticmethod(lambda: 1)
        get_world_size = staticmethod(lambda: 2)
        get_local_rank = staticmethod(lambda: 0)
        get_local_world_size = staticmethod(lambda: 1)

    ray_train(monkeypatch, Context)
    assert current(TORCH) == Rank(1, 2, 0, 1, "ray")


def test_ray_train_outside_a_worker_is_no_rank(monkeypatch):
    def outside():
        raise RuntimeError("not in a worker")

    ray_train(monkeypatch, outside)
    assert current(TORCH).source == "torchrun"


def test_unknown_local_rank_collects_rather_twice_than_never():
    assert Rank(3, 4, None, None).first_here
    assert Rank(3, 4, None, None).pods == 4
    assert not Rank(3, 4, 1, 2).first_here
    assert Rank(3, 5, 1, 2).pods == 3


@pytest.mark.parametrize(
    ("asked", "collectors", "interval"),
    [(10, 4, 10), (10, 5, 20), (60, 5, 60), (10, 16, 40), (1, 128, 320), (1, 1, 1)],
)
def test_interval_floor(asked, collectors, interval):
    assert floor(asked, collectors) == interval


ENV = {
    "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "5",
    "MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING": "3",
}


def test_arguments_win_over_environment_over_defaults():
    assert timing(None, None, 1, {})[:2] == (10.0, 1)
    got = timing(None, None, 1, ENV)
    assert got[:2] == (5.0, 3)
    assert len(got.lines) == 2
    assert timing(2, 1, 1, ENV) == (2.0, 1, [])


@pytest.mark.parametrize("bad", ["abc", "0", "-1", "nan", "inf"])
def test_bad_values_are_told_and_the_default_taken(bad):
    got = timing(None, None, 1, {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": bad})
    assert got.interval_s == 10
    assert bad in got.lines[0]
    assert timing(-3, None, 1, {}).interval_s == 10
