"""The HTTP application: routes, problems, headers and threads put together."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from litestar import Litestar, Request, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.types import ControllerRouterHandler, Message, Scope

from dure.api import jobs, logs, people, pool, problems
from dure.api.auth import Access
from dure.api.openapi import document
from dure.api.routing import EXTRA_HEADERS, Api, Call, Reply, Route, Routes, handler_of
from dure.core.errors import ErrorCode
from dure.engine.controller import Controller
from dure.engine.engine import Engine
from dure.ports import Ids
from dure.settings import Settings

log = structlog.get_logger("dure.api")
routes = Routes("contract")
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    # Answers differ by caller and language; a shared cache must keep none of them.
    "cache-control": "no-store",
    "vary": "Accept-Language, Authorization",
}
"""Set unless the answer has its own."""


@routes.add("GET", "/v1/schema", dict[str, Any], access=Access.ANYBODY)
def show_schema(call: Call) -> Reply:
    """Show this document."""
    return Reply(msgspec.Raw(call.api.schema))


def table() -> list[Route]:
    """All routes of the API."""
    modules = (routes, jobs.routes, logs.routes, pool.routes, people.routes)
    return [route for module in modules for route in module.all]


def create_app(
    engine: Engine,
    controller: Controller | None = None,
    *,
    settings: Settings,
    ids: Ids,
    route_handlers: Sequence[ControllerRouterHandler] = (),
) -> Litestar:
    """Build the application over a running engine; `app.state.api` is what its parts share.

    Whoever runs it should call `app.state.api.stop_streams()` when a stop begins, so that
    followed logs end at once. `route_handlers` are further pages beside the API.
    """
    api = Api(engine, controller, settings, ids)
    api.schema = msgspec.json.encode(document(table()))

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        api.open()
        yield
        api.close()

    return Litestar(
        route_handlers=[*(handler_of(api, route) for route in table()), *route_handlers],
        exception_handlers={HTTPException: refuse, Exception: refuse},
        before_send=[_add_headers],
        lifespan=[lifespan],
        state=State({"api": api}),
        openapi_config=None,
        logging_config=None,
        request_max_body_size=settings.limits.body_kib * 1024,
    )


def refuse(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer whatever was raised as a problem; what is a bug is logged with its trace id."""
    api: Api = request.app.state.api
    settings = api.settings
    lang = problems.language(request.headers.get("accept-language", ""), settings.server.language)
    known, found = problems.of_exception(error, request.url.path, settings.limits.body_kib)
    trace_id = api.ids.token()[:16]
    made = problems.problem(known, found, lang, trace_id)
    if known.code is ErrorCode.INTERNAL:
        text = "".join(traceback.format_exception(error))
        log.error("request_failed", trace_id=trace_id, path=request.url.path, error=text)
    headers = {"content-language": lang}
    if isinstance(error, HTTPException) and error.headers:
        headers |= {k.lower(): v for k, v in error.headers.items() if k.lower() == "allow"}
    if known.code is ErrorCode.UNAUTHENTICATED:
        headers["www-authenticate"] = 'Bearer realm="dure"'
    after_s = known.params.get("retry_after_s")
    if after_s is not None:
        headers["retry-after"] = str(after_s)
    return Response(
        msgspec.json.encode(made),
        media_type=problems.MEDIA_TYPE,
        status_code=made.status,
        headers=headers,
    )


async def _add_headers(message: Message, scope: Scope) -> None:
    """Give every answer its headers, also those that no handler made."""
    if message["type"] != "http.response.start":
        return
    present = {name.lower() for name, _ in message["headers"]}
    extra = scope.get("state", {}).get(EXTRA_HEADERS, {})
    more = [
        (k.encode("latin-1"), v.encode("latin-1"))
        for k, v in (SECURITY_HEADERS | extra).items()
        if k.encode("latin-1") not in present
    ]
    message["headers"] = [*message["headers"], *more]
