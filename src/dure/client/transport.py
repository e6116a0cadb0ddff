"""One kept-alive HTTP connection, with bounded waiting and repeats that cannot do harm.

Rule: only what may safely happen twice is repeated (GET, and POST with an
Idempotency-Key), and only after a lost connection, 502, a 503 that is no maintenance, or a
429 that says when to come back.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dure.client.config import Profile
from dure.client.errors import ApiError, Unreachable
from dure.wire import Problem

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

CONNECT_S = 5.0
READ_S = 30.0
STREAM_S = 90.0
TRIES = 4
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 20.0
"""A server that asks for a longer pause is told to the caller instead of slept on."""


class Reply(NamedTuple):
    """A complete answer; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Sent(NamedTuple):
    """What `--verbose` shows of an exchange; never headers, so never the token."""

    method: str
    path: str
    outcome: str
    took_s: float
    attempt: int


Observer = Callable[[Sent], None]


def _unobserved(_: Sent) -> None:
    pass


class Transport:
    """Sends requests to one server. Safe to use from several threads, one at a time."""

    def __init__(
        self,
        profile: Profile,
        language: str,
        *,
        user_agent: str,
        timeout_s: float = READ_S,
        tries: int = TRIES,
        observe: Observer | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.profile = profile
        self.language = language
        self._user_agent = user_agent
        self._timeout_s = timeout_s
        self._tries = max(1, tries)
        self._observe = observe or _unobserved
        self._pause = pause
        self._lock = threading.Lock()
        self._kept: HTTPConnection | None = None

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send and return a 2xx or 304 answer; else raise ApiError or Unreachable."""
        given = dict(headers or {})
        repeatable = method in {"GET", "HEAD"} or (method == "POST" and "Idempotency-Key" in given)
        tries = self._tries if repeatable else 1
        for attempt in range(1, tries + 1):
            started = time.monotonic()
            wait_s: float | None
            try:
                with self._lock:
                    reply = self._once(method, path, body, given)
            except Unreachable as error:
                failure: ApiError | Unreachable = error
                wait_s = _backoff_s(attempt)
            else:
                took = time.monotonic() - started
                self._observe(Sent(method, path, str(reply.status), took, attempt))
                if reply.status < 300 or reply.status == 304:
                    return reply
                failure = refusal(reply)
                wait_s = _worth_repeating(failure, attempt)
            if isinstance(failure, Unreachable):
                took = time.monotonic() - started
                self._observe(Sent(method, path, failure.reason, took, attempt))
            if wait_s is None or attempt == tries:
                raise failure
            self._pause(wait_s)
        raise AssertionError("unreachable: the last try returns or raises")

    @contextmanager
    def stream(self, path: str) -> Iterator[HTTPResponse]:
        """Open a GET on a connection of its own; the body is read by the caller."""
        connection = self._connect(STREAM_S)
        try:
            with self._lost_is_unreachable():
                connection.request("GET", path, headers=self._headers({}))
                response = connection.getresponse()
            if response.status >= 300:
                with self._lost_is_unreachable():
                    body = response.read()
                raise refusal(Reply(response.status, _lower(response), body))
            with self._lost_is_unreachable():
                yield response
        finally:
            connection.close()

    def close(self) -> None:
        """Give the connection back; a later call opens a new one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    # -- one exchange --

    def _once(self, method: str, path: str, body: bytes | None, given: Mapping[str, str]) -> Reply:
        connection = self._connection()
        headers = self._headers(given)
        if body is not None:
            headers["Content-Type"] = "application/json"
        answered = False
        try:
            with self._lost_is_unreachable():
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                read = response.read()
                answered = True
        finally:
            if not answered:
                self.close()
        return Reply(response.status, _lower(response), read)

    def _headers(self, given: Mapping[str, str]) -> dict[str, str]:
        headers = {
            "Accept": "application/json, application/problem+json, text/plain",
            "Accept-Language": self.language,
            "User-Agent": self._user_agent,
            **given,
        }
        if self.profile.token:
            headers["Authorization"] = f"Bearer {self.profile.token}"
        return headers

    def _connection(self) -> HTTPConnection:
        kept = self._kept
        if kept is not None and kept.sock is not None:
            # A kept connection that is readable before we ask was closed by the server.
            # Seeing it now saves a request that could not safely be repeated.
            if not select.select([kept.sock], [], [], 0)[0]:
                return kept
            self.close()
        self._kept = self._connect(self._timeout_s)
        return self._kept

    def _connect(self, read_s: float) -> HTTPConnection:
        from http.client import HTTPConnection, HTTPSConnection  # noqa: PLC0415 - start-up time

        scheme, _, rest = self.profile.url.partition("://")
        kind = HTTPSConnection if scheme == "https" else HTTPConnection
        with self._lost_is_unreachable():
            connection = kind(rest.partition("/")[0], timeout=min(CONNECT_S, read_s))
            connection.connect()
        connection.sock.settimeout(read_s)
        return connection

    @contextmanager
    def _lost_is_unreachable(self) -> Iterator[None]:
        from http.client import HTTPException  # noqa: PLC0415 - start-up time

        try:
            yield
        except TimeoutError:
            raise Unreachable(self.profile.url, "no answer in time") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unreachable(self.profile.url, reason) from None


def base_path(url: str) -> str:
    """Path under which a proxy has put the server: empty, or `/dure`."""
    rest = url.partition("://")[2]
    _, slash, path = rest.partition("/")
    return slash + path


def _lower(response: HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


def refusal(reply: Reply) -> ApiError:
    """Build the error of an answer, also when a proxy and not Dure wrote it."""
    try:
        problem = msgspec.json.decode(reply.body, type=Problem)
    except msgspec.MsgspecError:
        problem = Problem(
            type="about:blank",
            title=f"HTTP {reply.status}",
            status=reply.status,
            detail=f"The server answered {reply.status} without an explanation.",
            code=f"HTTP_{reply.status}",
        )
    after: float | None = None
    with suppress(ValueError):
        after = max(0.0, float(reply.headers.get("retry-after", "")))
    return ApiError(problem, reply.status, after)


def _backoff_s(attempt: int) -> float:
    return FIRST_PAUSE_S * float(2**attempt)


def _worth_repeating(error: ApiError, attempt: int) -> float | None:
    """Seconds to wait before a repeat, or None."""
    backoff_s = _backoff_s(attempt)
    if error.code in {"SERVICE_MAINTENANCE", "QUEUE_LIMIT"}:
        return None
    if error.status == 429:
        pause_s = error.retry_after_s
    elif error.status in {502, 503}:
        pause_s = max(backoff_s, error.retry_after_s or 0)
    elif error.code == "IDEMPOTENCY_IN_FLIGHT":
        # Our own first try is still being worked on.
        pause_s = backoff_s
    else:
        return None
    if pause_s is None or pause_s > LONGEST_PAUSE_S:
        return None
    return pause_s
