"""The published contract: the snapshot is what the server says, and the server keeps to it."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dure.api.app import table
from dure.api.openapi import document, refusals
from dure.api.problems import STATUS
from dure.core.errors import ErrorCode
from dure.core.model import Phase
from dure.engine import admin
from tests.api.site import Site, site

SNAPSHOT = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = int(os.environ.get("DURE_FUZZ_EXAMPLES", "8"))
schema = schemathesis.openapi.from_dict(document(table()))


def test_snapshot() -> None:
    """`/v1` only grows: a change of this file is a change of the contract, to be read as one."""
    made = json.dumps(document(table()), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    if os.environ.get("DURE_SNAPSHOT") == "write":
        SNAPSHOT.parent.mkdir(parents=True, exist_ok=True)
        SNAPSHOT.write_text(made)
    assert SNAPSHOT.read_text() == made, (
        f"{SNAPSHOT.name} differs from the code; "
        "DURE_SNAPSHOT=write python -m pytest tests/api/test_contract.py rewrites it"
    )


def test_served_document_is_the_built_one(here: Site) -> None:
    assert here.get("", "/v1/schema") == json.loads(json.dumps(document(table())))


def test_names_are_unique_and_described() -> None:
    names = [r.name for r in table()]
    assert len(set(names)) == len(names)
    assert all((r.run.__doc__ or "").strip().endswith(".") for r in table())


def test_constraints_of_list_items_are_kept() -> None:
    parts = document(table())["components"]["schemas"]
    assert parts["JobIn"]["properties"]["command"]["items"]["maxLength"] == 131_072
    assert parts["JobIn"]["additionalProperties"] is False


def test_every_code_is_some_routes_or_every_paths() -> None:
    told = set().union(*(refusals(r) for r in table()))
    # An unknown method is refused before any route; a bad setting stops the start.
    assert set(ErrorCode) - told == {ErrorCode.METHOD_NOT_ALLOWED, ErrorCode.BAD_SETTING}
    assert {STATUS[c] for c in told} >= {400 + n for n in (1, 3, 4, 9, 12, 13, 15, 22, 28, 29)}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("logs")) as made:
        # Followed logs of jobs that never end would never end either.
        made.app.state.api.stop_streams()
        for user in ("bcg", "vis"):
            made.submit(user)
            made.submit(user, hold=True)
            made.submit(user, num_gpus=2)
        yield made


@pytest.fixture(params=["root", "bcg"])
def who(request: pytest.FixtureRequest) -> str:
    return str(request.param)


KNOWN = {"tier": "RTX4090", "node": "gpu-1", "lab": "BCG", "user": "ann"}


def _aim(case: Any, turn: int) -> None:
    """Half of the time ask about something that exists."""
    for name in case.path_parameters or {}:
        if turn % 2 or case.method == "DELETE":
            continue
        if name == "job":
            case.path_parameters[name] = 1 + turn // 2 % 6
        elif name in KNOWN:
            case.path_parameters[name] = KNOWN[name]


TURNS = itertools.count()


@schema.parametrize()
@hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
def test_the_server_keeps_to_its_contract(case: Any, who: str, fuzzed: Site) -> None:
    if fuzzed.engine.world.phase is not Phase.NORMAL:
        admin.set_phase(fuzzed.engine, "root", Phase.NORMAL)
    _aim(case, next(TURNS))
    headers = {**(case.headers or {}), "Authorization": f"Bearer {fuzzed.tokens[who]}"}
    case.headers = headers
    sent = case.as_transport_kwargs(base_url="http://testserver")
    sent["content"] = sent.pop("data", None)
    sent["headers"] = [
        (k.encode("latin-1"), str(v).encode("latin-1")) for k, v in sent["headers"].items()
    ]
    response = fuzzed.client.request(
        **{k: v for k, v in sent.items() if k != "cookies" and v is not None}
    )
    case.validate_response(response, checks=CHECKS)
