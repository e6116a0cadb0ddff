"""torchrun, data parallel: the driver opens one run, every rank attaches to it.

MLFLOW_TRACKING_URI=http://… python examples/tracking/torchrun_ddp.py 2
"""

import os
import subprocess
import sys
import time

import mlflow
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dure_sdk import tracking


def drive(workers: str) -> int:
    """Open the run, start the ranks, end the run when they have ended."""
    tracking.init_driver("dure-examples", "torchrun-ddp")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(  # noqa: S603 - this very file
        [*command, f"--nproc-per-node={workers}", __file__], check=False
    )
    tracking.end_run("FINISHED" if done.returncode == 0 else "FAILED")
    return done.returncode


def train(epochs: int = 20) -> None:
    """One rank."""
    tracking.prepare_worker()
    tracking.enable_system_metrics(all_workers=True, interval=1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        loss = model(torch.randn(256, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            mlflow.log_metric("loss", loss.item(), step=epoch)
        time.sleep(0.1)
    dist.destroy_process_group()
    tracking.end_run()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        sys.exit(drive(sys.argv[1] if len(sys.argv) > 1 else "2"))
