"""Calls that may hang, made in a thread of their own so that nothing else waits for them."""

from __future__ import annotations

import queue
import threading
from typing import Any, Callable, TypeVar

T = TypeVar("T")


class HangingError(Exception):
    """A call has not returned in time; it may still be running."""


def bounded(call: Callable[[], T], limit_s: float) -> T:
    """The call's result, or its exception, or `HangingError` after `limit_s`."""
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, whatever it is
            done.put((None, error))

    threading.Thread(target=work, name="dure-aside", daemon=True).start()
    try:
        result, error = done.get(timeout=max(limit_s, 0))
    except queue.Empty:
        raise HangingError(f"no answer within {limit_s:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


class Aside:
    """A collector that works in one thread of its own and is waited for only so long.

    A driver that hangs costs its own series and nothing else. What comes late is dropped: a value
    is shown at the time it was true, or not at all.
    """

    def __init__(self, inner: Any, limit_s: float) -> None:
        self._inner = inner
        self._limit_s = limit_s
        self._metrics: dict[str, list[float]] = {}
        self._orders: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._asked = 0
        self._answered = 0
        threading.Thread(target=self._work, name="dure-collector", daemon=True).start()

    @property
    def name(self) -> str:
        """The inner collector's, for messages."""
        return str(getattr(self._inner, "name", None) or type(self._inner).__name__)

    def collect_metrics(self) -> None:
        """Ask for one sample; raises what the inner collector raised, or `HangingError`."""
        while not self._answers.empty():
            self._answered = self._answers.get()[0]
        if self._answered < self._asked:
            raise HangingError(f"{self.name}: a call has not returned yet")
        self._asked += 1
        self._orders.put(self._asked)
        try:
            self._answered, got = self._answers.get(timeout=self._limit_s)
        except queue.Empty:
            raise HangingError(f"{self.name}: no answer within {self._limit_s:g} s") from None
        if isinstance(got, BaseException):
            raise got
        for key, values in got.items():
            self._metrics.setdefault(key, []).extend(values)

    def aggregate_metrics(self) -> dict[str, float]:
        """The mean of each series, as MLflow's collectors do it."""
        return {key: round(sum(v) / len(v), 1) for key, v in self._metrics.items()}

    def clear_metrics(self) -> None:
        """Forget the samples."""
        self._metrics.clear()

    def close(self) -> None:
        """Let the thread end once it is back from its last call."""
        self._orders.put(0)

    def _work(self) -> None:
        while order := self._orders.get():
            self._answers.put((order, self._sample()))

    def _sample(self) -> Any:
        try:
            self._inner.collect_metrics()
            got = {
                k: list(v) if isinstance(v, list) else [v] for k, v in self._inner._metrics.items()
            }
            self._inner.clear_metrics()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that asked
            return error
        return got
