from __future__ import annotations

import pytest

from tests.lease.servers import RIGS, RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture(params=RIGS)
def rig(request, redis_server):
    made = RIGS[request.param](redis_server)
    yield made
    made.close()
