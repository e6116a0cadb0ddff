"""The raw call under every typed one: paths, keys, ETags, decoding."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from dure import __version__
from dure.client.config import resolve
from dure.client.errors import ApiError, BadReply
from dure.client.transport import READ_S, TRIES, Observer, Reply, Transport, base_path

T = TypeVar("T")


class Calls:
    """Sends requests to one server and decodes what comes back."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        language: str | None = None,
        *,
        profile: str | None = None,
        timeout_s: float = READ_S,
        tries: int = TRIES,
        observe: Observer | None = None,
    ) -> None:
        found = resolve(url, token, profile)
        self.url = found.url
        self.signed_in = bool(found.token)
        self._base = base_path(found.url)
        self._transport = Transport(
            found,
            _language(language or found.language or os.environ.get("DURE_LANG")),
            user_agent=f"dure/{__version__}",
            timeout_s=timeout_s,
            tries=tries,
            observe=observe,
        )

    def __repr__(self) -> str:
        return f"<Client {self.url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back."""
        self._transport.close()

    # -- raw --

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        etag: str | None = None,
        key: str | None = None,
    ) -> Any:
        """Send any request, `body` as JSON; return the decoded answer (None if empty)."""
        reply = self.send(method, path, body, etag=etag, key=key)
        return decode(reply, Any) if reply.body else None

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        etag: str | None = None,
        key: str | None = None,
    ) -> Reply:
        """Like `request`, but return status, headers and bytes."""
        headers = {}
        if etag:
            headers["If-Match"] = etag
        if key:
            headers["Idempotency-Key"] = key
        data = None if body is None else msgspec.json.encode(body)
        return self._transport.send(method, self._base + path, data, headers)

    def _get(self, kind: type[T], path: str, **query: object) -> T:
        return decode(self.send("GET", path + query_of(query)), kind)

    def _write(self, kind: type[T], method: str, path: str, body: object = None) -> T:
        return decode(self.send(method, path, body), kind)

    def _put(self, kind: type[T], method: str, path: str, body: object) -> T:
        """Change what an administrator sees now: with the ETag of what is there, if it is."""
        return decode(self.send(method, path, body, etag=self._etag(path)), kind)

    def _etag(self, path: str) -> str | None:
        try:
            return self.send("GET", path).headers.get("etag")
        except ApiError as error:
            if error.status == 404:
                return None
            raise


def _language(asked: str | None) -> str:
    return "ko" if asked and asked.lower().startswith("ko") else "en"


def new_key() -> str:
    """Make an Idempotency-Key."""
    return os.urandom(16).hex()


def query_of(params: Mapping[str, object]) -> str:
    """Encode a query string; parameters that are None or empty are left out."""
    from urllib.parse import urlencode  # noqa: PLC0415 - start-up time

    given = {k: v for k, v in params.items() if v is not None and v != []}
    return "?" + urlencode(given, doseq=True) if given else ""


def path_name(text: str) -> str:
    """Quote a name as one segment of a path."""
    from urllib.parse import quote  # noqa: PLC0415 - start-up time

    # A name of dots alone would climb to another path.
    return quote(text, safe="").replace(".", "%2E") if set(text) <= {"."} else quote(text, safe="")


def decode(reply: Reply, kind: type[T]) -> T:
    """Decode an answer; BadReply when it is not one of Dure's."""
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except msgspec.MsgspecError as error:
        raise BadReply(f"the answer is not one of Dure's ({error}); check the address") from None
