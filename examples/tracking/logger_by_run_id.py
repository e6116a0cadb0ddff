"""A logger that holds its run by id (as Lightning's MLFlowLogger does) and opens none.

MLFLOW_TRACKING_URI=http://… python examples/tracking/logger_by_run_id.py
"""

import time

import mlflow

from dure_sdk import tracking


class Logger:
    """What such loggers do: a client, an experiment, a run id."""

    def __init__(self, experiment: str) -> None:
        self.tracking_uri = mlflow.get_tracking_uri()
        self.client = mlflow.MlflowClient(self.tracking_uri)
        found = self.client.get_experiment_by_name(experiment)
        where = found.experiment_id if found else self.client.create_experiment(experiment)
        self.run_id = str(self.client.create_run(where).info.run_id)

    def log(self, name: str, value: float, step: int) -> None:
        """One value."""
        self.client.log_metric(self.run_id, name, value, step=step)


def main() -> None:
    """Train nothing, but log it well."""
    logger = Logger("dure-examples")
    tracking.enable_system_metrics(
        run_id=logger.run_id, tracking_uri=logger.tracking_uri, interval=1
    )
    for step in range(20):
        logger.log("loss", 1 / (step + 1), step)
        time.sleep(0.1)
    tracking.end_run()  # last sample and flush; the run's end is the logger's business
    logger.client.set_terminated(logger.run_id)


if __name__ == "__main__":
    main()
