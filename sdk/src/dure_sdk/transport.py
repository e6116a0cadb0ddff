"""How samples reach MLflow: one request, no hidden retries, a time-out of our own.

MLflow's client retries for minutes and waits for a silent server for twenty; both would be spent
at the end of a job with its GPUs held. So an http(s) server is asked through MLflow's own request
function (credentials, headers and certificates are MLflow's business) with no retry and a short
time-out; every other kind of store goes through `MlflowClient`.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from dure_sdk.names import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

BATCH_MAX = 1000
"""Metrics MLflow takes in one request."""
GONE = "RESOURCE_DOES_NOT_EXIST"
API = "/api/2.0/mlflow/runs"


class AwayError(Exception):
    """The server does not answer, or says that it cannot now: worth another try."""


class RefusedError(Exception):
    """The server answered and does not want this: `final` if it never will."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class Metric(NamedTuple):
    """One value of one series."""

    key: str
    value: float
    timestamp_ms: int
    step: int


class HttpTransport:
    """An MLflow tracking server."""

    def __init__(self, uri: str, run_id: str) -> None:
        self._uri = uri
        self._run_id = run_id
        self._store: Any | None = None

    def log(self, metrics: list[Metric], tags: Mapping[str, str], timeout_s: float) -> None:
        """Write metrics and tags."""
        body = {
            "run_id": self._run_id,
            "metrics": [
                {"key": m.key, "value": m.value, "timestamp": m.timestamp_ms, "step": m.step}
                for m in metrics
            ],
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        self._ask("POST", "/log-batch", timeout_s, json=body)

    def next_step(self, suffix: str, timeout_s: float) -> int:
        """The step after the newest of this worker's own series: a resumed run goes on."""
        run = self._ask("GET", "/get", timeout_s, params={"run_id": self._run_id})["run"]
        metrics = run.get("data", {}).get("metrics", [])
        return _after([(m["key"], int(m.get("step", 0))) for m in metrics], suffix)

    def finish(self, status: str, timeout_s: float) -> None:
        """Write the run's end."""
        body = {"run_id": self._run_id, "status": status, "end_time": int(time.time() * 1000)}
        self._ask("POST", "/update", timeout_s, json=body)

    def _ask(self, method: str, path: str, timeout_s: float, **kwargs: Any) -> Any:
        from mlflow.exceptions import MlflowException
        from mlflow.utils.rest_utils import http_request

        try:
            answer = http_request(
                self._credentials(),
                API + path,
                method,
                max_retries=0,
                backoff_factor=0,
                timeout=timeout_s,
                raise_on_status=False,
                **kwargs,
            )
        except (MlflowException, OSError) as error:
            raise AwayError(_short(error)) from error
        return _read(answer.status_code, answer.text)

    def _credentials(self) -> Any:
        if self._store is None:
            from mlflow.tracking import MlflowClient

            self._store = MlflowClient(self._uri)._tracking_client.store
        return self._store.get_host_creds()  # at each request: a token may have been renewed


class ClientTransport:
    """A store that is no HTTP server: a local database, or a vendor's own scheme."""

    def __init__(self, uri: str, run_id: str) -> None:
        self._uri = uri
        self._run_id = run_id
        self._made: Any | None = None

    def log(self, metrics: list[Metric], tags: Mapping[str, str], timeout_s: float) -> None:
        """Write metrics and tags; the store's own time-outs hold."""
        del timeout_s
        from mlflow.entities import Metric as MlflowMetric
        from mlflow.entities import RunTag

        self._call(
            "log_batch",
            metrics=[MlflowMetric(*metric) for metric in metrics],
            tags=[RunTag(key, value) for key, value in tags.items()],
            # Never MLflow's shared queue: its users' own calls fail when it is shut down.
            synchronous=True,
        )

    def next_step(self, suffix: str, timeout_s: float) -> int:
        """The step after the newest of this worker's own series."""
        del timeout_s
        run = self._call("get_run")
        return _after([(m.key, m.step) for m in run.data._metric_objs], suffix)

    def finish(self, status: str, timeout_s: float) -> None:
        """Write the run's end."""
        del timeout_s
        self._call("set_terminated", status=status)

    def _call(self, method: str, **kwargs: Any) -> Any:
        from mlflow.exceptions import MlflowException

        if self._made is None:
            from mlflow.tracking import MlflowClient

            self._made = MlflowClient(self._uri)
        try:
            return getattr(self._made, method)(self._run_id, **kwargs)
        except MlflowException as error:
            final = error.error_code == GONE
            if final or error.error_code == "INVALID_PARAMETER_VALUE":
                raise RefusedError(_short(error), final=final) from error
            raise AwayError(_short(error)) from error


def transport(uri: str, run_id: str) -> HttpTransport | ClientTransport:
    """The transport for a tracking URI."""
    http = uri.startswith(("http://", "https://"))
    return HttpTransport(uri, run_id) if http else ClientTransport(uri, run_id)


def _read(status: int, text: str) -> Any:
    """The answer's body, or what its status means for the next try."""
    try:
        body = json.loads(text or "{}")
    except ValueError:
        body = None
    said: dict[str, Any] = body if isinstance(body, dict) else {}
    if status == 200 and body is not None:
        return said
    code = said.get("error_code", "")
    words = f"HTTP {status} {code} {said.get('message', '')}".strip()
    # A proxy before a server that is down answers 404 too: only MLflow's own word is final.
    if code == GONE:
        raise RefusedError(words, final=True)
    if status in {400, 413}:
        raise RefusedError(words)
    raise AwayError(words)


def _after(steps: list[tuple[str, int]], suffix: str) -> int:
    own = [step for key, step in steps if key.startswith(PREFIX) and key.endswith(suffix)]
    return max(own) + 1 if own else 0


def _short(error: BaseException) -> str:
    """The last cause of a chain that repeats itself over many lines."""
    text = str(error).replace("\n", " ")
    return text if len(text) <= 200 else "…" + text[-200:]
