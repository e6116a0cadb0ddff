"""One process, PyTorch: open the run, turn system metrics on, and only then make data and model.

MLFLOW_TRACKING_URI=http://… python examples/tracking/plain_loop.py
"""

import time

import mlflow
import torch

from dure_sdk import job, tracking


def main(epochs: int = 20) -> None:
    """Fit a line."""
    mlflow.set_experiment("dure-examples")
    tracking.start_run(run_name="plain-loop")
    # Here: loaders and models are where memory jumps, and the first sample should precede it.
    tracking.enable_system_metrics(interval=1)
    job.on_stop(lambda: tracking.end_run("KILLED"))

    x = torch.linspace(0, 1, 4096).reshape(-1, 1)
    y = 3 * x + 1 + 0.1 * torch.randn_like(x)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(epochs):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mlflow.log_metric("loss", loss.item(), step=epoch)
        job.progress(epoch + 1, epochs, loss=loss.item())
        time.sleep(0.1)
    torch.save(model.state_dict(), job.output_dir() / "model.pt")
    tracking.end_run()


if __name__ == "__main__":
    main()
