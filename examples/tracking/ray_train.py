"""Ray Train, two CPU workers: the driver's run id goes to the workers in their configuration.

MLFLOW_TRACKING_URI=http://… python examples/tracking/ray_train.py
"""

import os
import time
from typing import Any

import mlflow
import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from dure_sdk import tracking


def train(config: dict[str, Any]) -> None:
    """One worker."""
    tracking.prepare_worker(config["run_id"], tracking_uri=config["tracking_uri"])
    tracking.enable_system_metrics(all_workers=True, interval=1)
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(config["epochs"]):
        loss = model(torch.randn(256, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ray.train.get_context().get_world_rank() == 0:
            mlflow.log_metric("loss", loss.item(), step=epoch)
        time.sleep(0.1)
    tracking.end_run()


def main() -> None:
    """Open the run, train, end the run."""
    run_id = tracking.init_driver("dure-examples", "ray-train")
    ray.init(num_cpus=2, include_dashboard=False)
    config = {"run_id": run_id, "tracking_uri": mlflow.get_tracking_uri(), "epochs": 20}
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=os.environ.get("JOB_OUTPUT_DIR")),
    )
    trainer.fit()
    tracking.end_run()


if __name__ == "__main__":
    main()
