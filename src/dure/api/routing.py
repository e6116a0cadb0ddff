"""One table of routes, and the one way from a request to an answer.

Every route says who may call it, what it reads and what it refuses; access, limits,
decoding, ETags and the OpenAPI document all follow from that, so none can be forgotten.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec
from litestar import HttpMethod, Request
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from dure.api import caching
from dure.api.auth import Access, Caller, identify, permit
from dure.api.limits import Limiter, Rate
from dure.api.problems import Unreadable, field_error, language, unreadable
from dure.core.errors import DureError, ErrorCode
from dure.core.model import User
from dure.engine.controller import Controller
from dure.engine.engine import Engine
from dure.ports import Ids
from dure.settings import Settings
from dure.wire import CODE, FieldError

THREADS = 16
"""Requests that may be inside the engine at once; the store is the narrow place anyway."""
EXTRA_HEADERS = "dure_headers"
T = TypeVar("T")


class Api:
    """What all handlers share."""

    def __init__(
        self, engine: Engine, controller: Controller | None, settings: Settings, ids: Ids
    ) -> None:
        self.engine = engine
        self.controller = controller
        self.settings = settings
        self.ids = ids
        self.limiter = Limiter(settings.limits)
        self.threads = _threads()
        self.closed = False
        self.stopping = threading.Event()
        self.schema = b""

    def stop_streams(self) -> None:
        """Let open streams end, so that a stop need not wait for their readers."""
        self.stopping.set()

    def open(self) -> None:
        """Serve again after a `close`: an application may be started more than once."""
        if self.closed:
            self.threads = _threads()
            self.stopping.clear()
            self.closed = False

    def close(self) -> None:
        """Give the threads back."""
        self.stopping.set()
        self.closed = True
        self.threads.shutdown(wait=True, cancel_futures=True)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="dure-api")


class Call(msgspec.Struct, frozen=True):
    """One request, after its caller was identified."""

    api: Api
    caller: Caller | None
    key: str
    lang: str
    headers: Mapping[str, str]

    @property
    def engine(self) -> Engine:
        """The engine of this server."""
        return self.api.engine

    @property
    def actor(self) -> User:
        """Who asks."""
        if self.caller is None:
            raise DureError(ErrorCode.UNAUTHENTICATED)
        return self.caller.user

    @property
    def expectation(self) -> caching.Expectation:
        """What the author of this edit has seen."""
        return caching.Expectation(
            self.headers.get("if-match", ""), self.headers.get("if-none-match", "")
        )

    def idempotency_key(self) -> str:
        """Read Idempotency-Key: at most 200 visible ASCII characters."""
        key = self.headers.get("idempotency-key", "")
        if key and not re.fullmatch(r"[!-~]{1,200}", key):
            detail = "Expected 1 to 200 visible ASCII characters"
            raise Unreadable(422, [FieldError(pointer="Idempotency-Key:", detail=detail)])
        return key


class Reply(msgspec.Struct, frozen=True):
    """What a handler answers; `raw` replaces all of it."""

    out: msgspec.Struct | msgspec.Raw | None = None
    headers: dict[str, str] = {}
    stamp: object = None
    edit: str = ""
    raw: ASGIApp | None = None


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A route without query parameters: a misspelt one is refused, not ignored."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    method: str
    path: str
    run: Callable[..., Reply]
    tag: str
    out: Any
    status: int
    access: Access
    rate: Rate
    refuses: tuple[ErrorCode, ...]
    headers: tuple[str, ...]
    edits: bool
    body: Any
    query: Any
    params: dict[str, type]
    lists: frozenset[str]

    @property
    def name(self) -> str:
        """Operation id, and what a refusal calls the action."""
        return self.run.__name__


class Routes:
    """The routes of one module, in the order they are written."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.all: list[Route] = []

    def add(
        self,
        method: str,
        path: str,
        out: Any,
        *,
        status: int = 200,
        access: Access = Access.MEMBER,
        rate: Rate = Rate.READ,
        refuses: tuple[ErrorCode, ...] = (),
        headers: tuple[str, ...] = (),
        edits: bool = False,
    ) -> Callable[[Callable[..., Reply]], Callable[..., Reply]]:
        """Add a handler; its parameters say what it reads: `body`, `query`, path names."""

        def keep(run: Callable[..., Reply]) -> Callable[..., Reply]:
            hints = get_type_hints(run)
            given = {k: v for k, v in hints.items() if k not in {"call", "return"}}
            body, query = given.pop("body", None), given.pop("query", NoQuery)
            assert set(given) == set(re.findall(r"{(\w+)}", path)), path
            self.all.append(
                Route(
                    method=method,
                    path=path,
                    run=run,
                    tag=self.tag,
                    out=out,
                    status=status,
                    access=access,
                    rate=rate,
                    refuses=refuses,
                    headers=headers,
                    edits=edits,
                    body=body,
                    query=query,
                    params=given,
                    lists=_list_fields(query),
                )
            )
            return run

        return keep


def _list_fields(query: type[msgspec.Struct]) -> frozenset[str]:
    hints = get_type_hints(query)
    return frozenset(
        f.encode_name for f in msgspec.structs.fields(query) if get_origin(hints[f.name]) is list
    )


# -- from request to answer ----------------------------------------------------------


class _Incoming(msgspec.Struct, frozen=True):
    """A request as plain values, to be answered on another thread."""

    headers: Mapping[str, str]
    client: str
    path: dict[str, str]
    query: bytes
    body: bytes
    extra: dict[str, str]


def handler_of(api: Api, route: Route) -> HTTPRouteHandler:
    """Make Litestar's handler of one route."""

    async def answer(request: Request[Any, Any, Any]) -> ASGIApp:
        extra: dict[str, str] = {}
        request.scope["state"][EXTRA_HEADERS] = extra
        incoming = _Incoming(
            headers={k.lower(): v for k, v in request.headers.items()},
            client=request.client.host if request.client else "",
            path={k: str(v) for k, v in request.path_params.items()},
            query=request.scope["query_string"],
            body=await request.body() if route.body is not None else b"",
            extra=extra,
        )
        return await in_thread(api, partial(_answer, api, route, incoming))

    path = re.sub(r"{(\w+)}", r"{\1:str}", route.path)
    method = HttpMethod(route.method)
    return HTTPRouteHandler(path, http_method=method, status_code=200, name=route.name)(answer)


async def in_thread(api: Api, work: Callable[[], T]) -> T:
    """Do what may block on one of the API's threads."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(api.threads, work)


def _answer(api: Api, route: Route, incoming: _Incoming) -> ASGIApp:
    call = _admit(api, route, incoming)
    arguments: dict[str, Any] = _path(route, incoming.path)
    if route.query is not NoQuery:
        arguments["query"] = _query(route, incoming.query)
    else:
        _query(route, incoming.query)
    if route.body is not None:
        arguments["body"] = _body(route.body, incoming)
    reply = route.run(call, **arguments)
    if reply.raw is not None:
        return reply.raw
    return _respond(route, incoming, reply)


def _admit(api: Api, route: Route, incoming: _Incoming) -> Call:
    """Identify the caller, count the request, and refuse who may not call this."""
    engine = api.engine
    lang = language(incoming.headers.get("accept-language", ""), api.settings.server.language)
    incoming.extra["content-language"] = lang
    anonymous = f"client {incoming.client}"
    caller: Caller | None = None
    if route.access is not Access.ANYBODY:
        try:
            caller = identify(engine, incoming.headers.get("authorization", ""))
        except DureError:
            # Guessing tokens is counted too.
            api.limiter.take(anonymous, Rate.READ, engine.clock.now_ms())
            raise
    key = caller.key if caller else anonymous
    incoming.extra.update(api.limiter.take(key, route.rate, engine.clock.now_ms()).headers())
    if caller is not None:
        permit(caller, route.access, route.name)
    return Call(api=api, caller=caller, key=key, lang=lang, headers=incoming.headers)


def _path(route: Route, raw: Mapping[str, str]) -> dict[str, Any]:
    """Take names and numbers out of the path; what cannot exist is NOT_FOUND."""
    found: dict[str, Any] = {}
    for name, kind in route.params.items():
        text = raw[name]
        if kind is int and re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
            found[name] = int(text)
        elif kind is str and re.match(CODE, text):
            found[name] = text
        elif kind is str and route.method == "PUT":
            detail = f"Expected `str` matching regex {CODE!r}"
            raise Unreadable(422, [FieldError(pointer=f"{{{name}}}", detail=detail)])
        else:
            raise DureError(ErrorCode.NOT_FOUND, kind=name, id=text[:200])
    return found


def _query(route: Route, raw: bytes) -> Any:
    try:
        pairs = parse_qsl(
            raw.decode("latin-1"), keep_blank_values=True, errors="replace", max_num_fields=200
        )
    except ValueError as error:
        raise unreadable(error, "?") from error
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in route.lists:
            values.setdefault(name, []).append(value)
        elif name in values:
            raise Unreadable(422, [FieldError(pointer=f"?{name}", detail="given twice")])
        else:
            values[name] = value
    try:
        return msgspec.convert(values, route.query, strict=False)
    except msgspec.ValidationError as error:
        raise Unreadable(422, [field_error(str(error), "?")]) from error


def _body(kind: Any, incoming: _Incoming) -> Any:
    media = incoming.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise DureError(ErrorCode.UNSUPPORTED_MEDIA_TYPE)
    try:
        return msgspec.json.decode(incoming.body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise unreadable(error) from error


def _respond(route: Route, incoming: _Incoming, reply: Reply) -> ASGIResponse:
    headers = dict(reply.headers)
    if reply.out is None:
        return ASGIResponse(status_code=204, headers=headers)
    body = msgspec.json.encode(reply.out)
    if reply.edit or route.method == "GET":
        tag = caching.strong(reply.edit, body) if reply.edit else caching.weak(body, reply.stamp)
        headers["etag"] = tag
        seen = incoming.headers.get("if-none-match", "")
        if route.method == "GET" and seen and caching.not_modified(seen, tag):
            return ASGIResponse(status_code=304, headers=headers)
    return ASGIResponse(
        body=body, status_code=route.status, headers=headers, media_type="application/json"
    )
