"""The OpenAPI 3.1 document, made from the table of routes and the wire structs.

Litestar's own generator drops constraints of list items; msgspec's schemas keep them, and
they are what the decoder enforces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from dure import __version__, wire
from dure.api.auth import Access
from dure.api.problems import MEDIA_TYPE, STATUS
from dure.api.routing import NoQuery, Route
from dure.core.errors import ErrorCode

C = ErrorCode
REF = "#/components/schemas/{name}"
_HEADERS = {
    "Idempotency-Key": (
        "The same key with the same body gives the same job for a day.",
        {"type": "string", "pattern": "^[!-~]{1,200}$"},
    ),
    "If-Match": ("ETag that the edit is based on.", {"type": "string"}),
    "If-None-Match": ("ETag that the caller has; `*` on PUT: only create.", {"type": "string"}),
    "Accept-Language": ("`ko` or `en`, for sentences.", {"type": "string"}),
}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Build the whole document."""
    table = list(routes)
    kinds = _kinds(table)
    (_, components) = msgspec.json.schema_components(kinds, ref_template=REF)
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for route in table:
        paths[route.path][route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Dure",
            "version": __version__,
            "description": "One queue, one fair policy, one honest account for lab GPUs. "
            "`/v1` only grows. Errors are RFC 9457 problems with a stable `code`.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": dict(paths),
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _kinds(table: list[Route]) -> list[Any]:
    found: dict[Any, None] = {wire.Problem: None}
    for route in table:
        for kind in (route.body, route.out):
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                found[kind] = None
    return list(found)


def _operation(route: Route) -> dict[str, Any]:
    text = (route.run.__doc__ or "").strip()
    made: dict[str, Any] = {
        "operationId": route.name,
        "tags": [route.tag],
        "summary": text.partition("\n")[0],
        "parameters": [*_path_parameters(route), *_query_parameters(route), *_headers(route)],
        "responses": _responses(route),
        "security": [] if route.access is Access.ANYBODY else [{"token": []}],
    }
    rest = " ".join(text.partition("\n")[2].split())
    if rest:
        made["description"] = rest
    if route.body is not None:
        schema = {"$ref": REF.format(name=route.body.__name__)}
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return made


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": (
                {"type": "integer", "minimum": 1, "maximum": 999_999_999_999_999_999}
                if kind is int
                else {"type": "string", "pattern": wire.CODE}
            ),
        }
        for name, kind in route.params.items()
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if route.query is NoQuery:
        return []
    schema = msgspec.json.schema(route.query)
    definitions = schema["$defs"]
    properties = definitions[route.query.__name__]["properties"]
    return [
        {"name": name, "in": "query", "schema": _query_schema(prop, definitions)}
        for name, prop in properties.items()
    ]


def _query_schema(prop: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A query has no null: leaving a parameter out says that. References are written out."""
    if "anyOf" in prop:
        (prop,) = [p for p in prop["anyOf"] if p != {"type": "null"}]
    if "$ref" in prop:
        return dict(definitions[prop["$ref"].rpartition("/")[2]])
    made = {k: v for k, v in prop.items() if not (k == "default" and v is None)}
    if "items" in made:
        made["items"] = _query_schema(made["items"], definitions)
    return made


def _headers(route: Route) -> list[dict[str, Any]]:
    names = ["Accept-Language", *route.headers]
    if route.edits:
        names += ["If-Match", "If-None-Match"]
    elif route.method == "GET" and route.out is not str:
        names.append("If-None-Match")
    return [
        {
            "name": n,
            "in": "header",
            "required": False,
            "description": _HEADERS[n][0],
            "schema": _HEADERS[n][1],
        }
        for n in names
    ]


def refusals(route: Route) -> set[ErrorCode]:
    """All codes that a route may answer with."""
    codes = {*route.refuses, C.INVALID_REQUEST, C.RATE_LIMITED, C.STORE_FAILED, C.INTERNAL}
    if route.access is not Access.ANYBODY:
        codes.add(C.UNAUTHENTICATED)
    if route.access is Access.ADMIN:
        codes.add(C.FORBIDDEN)
    if route.params and route.method != "PUT":
        codes.add(C.NOT_FOUND)
    if route.body is not None:
        codes |= {C.TOO_LARGE, C.UNSUPPORTED_MEDIA_TYPE}
    return codes


def _responses(route: Route) -> dict[str, Any]:
    made: dict[str, Any] = {str(route.status): _success(route)}
    if route.method == "GET" and route.out is not str:
        made["304"] = {"description": "Not modified", "headers": _shown("ETag")}
    by_status: dict[int, list[str]] = defaultdict(list)
    for code in sorted(refusals(route)):
        by_status[STATUS[code]].append(code.value)
    # Malformed queries, headers and bodies are 400, those that are not valid 422.
    by_status[400].append(C.INVALID_REQUEST.value)
    for status, codes in sorted(by_status.items()):
        made[str(status)] = {
            "description": ", ".join(codes),
            "content": {MEDIA_TYPE: {"schema": {"$ref": REF.format(name="Problem")}}},
        }
    return made


def _success(route: Route) -> dict[str, Any]:
    description = (route.run.__doc__ or "").strip().partition("\n")[0]
    if route.out is None:
        return {"description": description}
    if route.out is str:
        return {
            "description": description,
            "headers": _shown("Dure-Log-Epoch", "Dure-Log-Next-Offset"),
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    made: dict[str, Any] = {"description": description}
    if route.method == "GET" or route.edits:
        made["headers"] = _shown("ETag")
    is_struct = isinstance(route.out, type) and issubclass(route.out, msgspec.Struct)
    schema = {"$ref": REF.format(name=route.out.__name__)} if is_struct else {"type": "object"}
    made["content"] = {"application/json": {"schema": schema}}
    return made


def _shown(*names: str) -> dict[str, Any]:
    return {n: {"schema": {"type": "string"}} for n in names}
