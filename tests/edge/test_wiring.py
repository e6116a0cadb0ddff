"""A server's and a doctor's first look at Redis."""

from __future__ import annotations

import pytest

from dure.core.errors import DureError, ErrorCode
from dure.settings import load
from dure.wiring.doctor import Check, _edge
from dure.wiring.edge import own_address, refuse_forgetful
from tests.lease.servers import RedisServer


def settings(folder, url: str, more: str = ""):
    path = folder / "dure.toml"
    path.write_text(f'[server]\nstate_dir = "{folder}"\n[edge]\nredis_url = "{url}"\n{more}')
    return load(path, {})


def lease_queue(found: list[Check]) -> list[tuple[str, str]]:
    return [(c.status, c.detail) for c in found if c.name == "lease queue"]


def test_a_forgetful_redis_is_refused_unless_allowed(tmp_path):
    server = RedisServer(tmp_path)
    try:
        good = settings(tmp_path, server.url)
        refuse_forgetful(good)
        assert lease_queue(_edge(good)) == [("ok", "Redis answers and keeps what it is told")]
        server.client().config_set("appendonly", "no")
        with pytest.raises(DureError) as refusal:
            refuse_forgetful(good)
        assert refusal.value.code is ErrorCode.BAD_SETTING
        assert "appendonly yes" in str(refusal.value)
        ((status, detail),) = lease_queue(_edge(good))
        assert (status, "appendonly" in detail) == ("fail", True)
        refuse_forgetful(settings(tmp_path, server.url, "allow_forgetful_redis = true\n"))
    finally:
        server.close()


def test_a_redis_that_is_away_is_no_reason_not_to_start(tmp_path):
    away = settings(tmp_path, "redis://127.0.0.1:1/0")
    refuse_forgetful(away)
    ((status, detail),) = lease_queue(_edge(away))
    assert status == "fail"
    assert "docs/howto/edge.md" in detail


def test_no_edge_nodes_no_check(tmp_path):
    assert lease_queue(_edge(load(None, {"DURE_SERVER__STATE_DIR": str(tmp_path)}))) == []


def test_an_address_that_is_none_is_refused(tmp_path):
    with pytest.raises(DureError) as refusal:
        refuse_forgetful(settings(tmp_path, "http://127.0.0.1:1/0"))
    assert "edge.redis_url" in str(refusal.value)


def test_own_address_is_the_one_towards_redis(tmp_path):
    assert own_address(settings(tmp_path, "redis://127.0.0.1:6379/0")) == "127.0.0.1"
    given = settings(tmp_path, "redis://127.0.0.1:6379/0", 'agent_host = "pc-a.lan"\n')
    assert own_address(given) == "pc-a.lan"
    assert own_address(settings(tmp_path, "redis://no-such-host.invalid/0")) == ""
