"""What only the real Redis can show: rights of an agent, lost scripts, keys, time limits."""

from __future__ import annotations

import base64
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from dure.adapters.lease.invite import Gone, accept, agent_rights, invite
from dure.adapters.lease.redis import SCRIPTS, RedisLeaseQueue
from dure.core.lease import (
    Bye,
    Commit,
    End,
    Enqueued,
    LeaseBeat,
    NodeMark,
    NodeReport,
    QueueAway,
    Report,
    Task,
)
from dure.core.model import JobId, NodeHealth, NodeId
from dure.ports import LeaseKey
from dure.settings import load
from tests.lease.servers import RedisRig, RedisServer

N1 = NodeId("n1")
RIGHTS = " ".join(agent_rights("dure:", "n1"))


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["edge.md", "edge.ko.md"])
def test_the_how_to_gives_the_rights_that_are_tested(page):
    text = (ROOT / "docs" / "howto" / page).read_text()
    assert RIGHTS.replace("n1", "pc-a") in text


def task(job: int, epoch: int = 1) -> Task:
    return Task(job=JobId(job), epoch=epoch, node=N1, payload=b"p", need_vram_mib=10)


@pytest.fixture
def rig(redis_server):
    made = RedisRig(redis_server)
    yield made
    made.close()


def whole_life(control: RedisLeaseQueue, agent: RedisLeaseQueue) -> None:
    control.enqueue([task(1), task(2)])
    assert agent.doorbell(N1, 1)
    first, second = (claim.ticket for claim in agent.claim(N1, ["a", "b"]))
    beats = [LeaseBeat(ticket=t, started_age_ms=0) for t in (first, second)]
    agent.beat(NodeReport(node=N1, sample=1), beats)
    assert agent.report([Report(ticket=first, end=End.DONE, freed_age_ms=0)]) == [Commit.OK]
    agent.bye(N1, Bye.OFF, [second])
    assert agent.report([Report(ticket=second, end=End.GONE, freed_age_ms=0)]) == [Commit.OK]


def test_an_agent_needs_few_rights(tmp_path):
    server = RedisServer(tmp_path)
    try:
        raw = server.client()
        raw.execute_command("ACL", "SETUSER", "n1", "on", ">secret", *RIGHTS.split())
        url = server.url.replace("redis://", "redis://n1:secret@")
        control, agent = RedisLeaseQueue(server.url), RedisLeaseQueue(url, agent=N1)
        whole_life(control, agent)
        assert control.connected() == {"n1"}
        with pytest.raises(QueueAway, match=r"can't (access|run)|permission"):
            agent.beat(NodeReport(node=NodeId("n2")), [])
        with pytest.raises(QueueAway, match=r"can't (access|run)|permission"):
            agent.faults()
        for forbidden in ("FLUSHALL", "KEYS *", "CONFIG GET *", "GET other"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                server.client(username="n1", password="secret").execute_command(*forbidden.split())
        with pytest.raises(QueueAway):
            RedisLeaseQueue(server.url.replace("redis://", "redis://n1:wrong@")).claim(N1, ["x"])
    finally:
        server.close()


def test_scripts_that_redis_forgot_are_loaded_again(rig):
    rig.raw.script_flush()
    whole_life(rig.queue, rig.queue)
    rig.raw.script_flush()
    assert rig.queue.enqueue([task(5), task(6)]) == [Enqueued.QUEUED] * 2


def test_every_script_is_used_by_name(rig):
    assert sorted(SCRIPTS) == sorted(rig.queue._scripts.source)


def test_keys_are_the_documented_ones(redis_server):
    rig = RedisRig(redis_server, prefix="{dure}:")
    whole_life(rig.queue, rig.queue)
    rig.queue.mark([NodeMark(node=N1, state=NodeHealth.STABLE, ready=True)])
    kinds = {
        key.decode().removeprefix("{dure}:"): rig.raw.type(key).decode()
        for key in rig.raw.scan_iter()
    }
    expected = {
        "task:1": "hash",
        "task:2": "hash",
        "node:state:n1": "hash",
        "task:queue:nodewait:n1": "zset",
        "task:changed": "zset",
        "task:seq": "string",
        "task:order": "string",
        "task:news": "list",
        "node:names": "set",
    }
    assert kinds == expected
    fields = rig.raw.hkeys("{dure}:task:2")
    documented = (
        "id type payload status target_node created_at dispatched_at started_at retries "
        "max_retries last_heartbeat lease_epoch lease_id node need_vram_mb idempotent seq "
        "node_wait_since"
    )
    assert set(documented.split()) <= {name.decode() for name in fields}
    node = {name.decode() for name in rig.raw.hkeys("{dure}:node:state:n1")}
    assert {
        "status",
        "gpu_status",
        "last_seen",
        "consecutive_failures",
        "gpu_free_vram_mb",
        "gpu_utilization",
        "gpu_consecutive_ready",
        "last_gpu_check",
        "gpus",
        "version",
        "penalty",
    } <= node
    rig.close()


def test_only_what_is_over_has_a_time_to_live(rig):
    whole_life(rig.queue, rig.queue)
    rig.queue.enqueue([task(3)])
    rig.queue.claim(N1, ["c"])
    rig.queue.settle([LeaseKey(job=JobId(1), epoch=1)])
    mortal = {key for key in rig.raw.scan_iter() if rig.raw.ttl(key) != -1}
    assert mortal == {b"dure:task:1", b"dure:task:heartbeat:3"}
    rig.queue.enqueue([task(1, epoch=2)])
    assert rig.raw.ttl("dure:task:1") == -1


def test_stale_results_are_kept_for_a_day(rig):
    rig.queue.enqueue([task(1)])
    (claim,) = rig.queue.claim(N1, ["a"])
    rig.queue.fence([LeaseKey(job=JobId(1), epoch=1)])
    report = Report(ticket=claim.ticket, end=End.DONE, result=b"evidence")
    assert rig.queue.report([report]) == [Commit.STALE]
    assert rig.raw.get("dure:task:stale:1:1") == b"evidence"
    assert 86_000 < rig.raw.ttl("dure:task:stale:1:1") <= 86_400


def test_how_redis_must_be_run(tmp_path):
    good = RedisServer(tmp_path)
    queue = RedisLeaseQueue(good.url)
    assert queue.faults() == []
    good.client().config_set("appendonly", "no")
    good.client().config_set("maxmemory-policy", "allkeys-lru")
    appendonly, eviction = queue.faults()
    assert "appendonly yes" in appendonly
    assert "noeviction" in eviction
    good.close()
    with pytest.raises(QueueAway):
        queue.faults()


def test_a_server_that_says_nothing_does_not_hang_anybody():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        queue = RedisLeaseQueue(f"redis://127.0.0.1:{port}/0", timeout_s=0.2)
        for call in (
            lambda: queue.claim(N1, ["a"]),
            lambda: queue.enqueue([task(1), task(2)]),
            queue.nodes,
            queue.connected,
        ):
            begun = time.monotonic()
            with pytest.raises(QueueAway):
                call()
            assert time.monotonic() - begun < 2


def test_connections_are_used_again_after_failures(tmp_path):
    """A pool makes a hundred connections in its life; an hour without Redis needs more tries."""
    server = RedisServer(tmp_path)
    queue = RedisLeaseQueue(server.url)
    try:
        queue.changes(0)
        server.crash()
        for _ in range(250):
            with pytest.raises(QueueAway, match=r"(?i)connect"):
                queue.changes(0)
        server.start()
        assert queue.changes(0).tasks == ()
        assert len(queue._lines._free) == 1
    finally:
        queue.close()
        server.close()


def test_a_restart_is_survived_by_open_connections(tmp_path):
    server = RedisServer(tmp_path)
    queue = RedisLeaseQueue(server.url)
    try:
        queue.enqueue([task(1)])
        queue.claim(N1, ["a"])
        server.crash()
        with pytest.raises(QueueAway):
            queue.changes(0)
        server.start()
        assert [t.job for t in queue.changes(0).tasks] == [1], "appendonly: nothing is forgotten"
        server.crash()
        server.start()
        assert queue.enqueue([task(2), task(3)]) == [Enqueued.QUEUED] * 2
    finally:
        queue.close()
        server.close()


def test_an_invitation_works_once(tmp_path):
    server = RedisServer(tmp_path, "--aclfile", str(acl_file(tmp_path)))
    try:
        secret, kept = invite(server.url, "n1", prefix="dure:", edge={"lease_ttl_s": 30})
        assert kept
        given = accept(secret)
        assert (given.node, given.edge) == ("n1", {"key_prefix": "dure:", "lease_ttl_s": 30})
        whole_life(RedisLeaseQueue(server.url), RedisLeaseQueue(given.redis_url, agent=N1))
        with pytest.raises(Gone):
            accept(secret)
        older, _ = invite(server.url, "n2", prefix="dure:")
        newer, _ = invite(server.url, "n2", prefix="dure:")
        with pytest.raises(Gone):
            accept(older)
        assert accept(newer).node == "n2"
        server.crash()
        server.start()
        RedisLeaseQueue(given.redis_url).claim(N1, ["x"])
    finally:
        server.close()


def acl_file(folder: Path) -> Path:
    path = folder / "users.acl"
    path.touch()
    return path


def test_accounts_that_redis_would_forget_are_told(tmp_path):
    server = RedisServer(tmp_path)
    try:
        secret, kept = invite(server.url, "n1", prefix="dure:", address="10.0.0.1:6380")
        assert not kept
        assert "10.0.0.1:6380" in base64.urlsafe_b64decode(secret).decode()
        for junk in ("", "junk", secret[:20]):
            with pytest.raises(Gone):
                accept(junk)
    finally:
        server.close()


def test_joining_from_the_command_line(tmp_path):
    server = RedisServer(tmp_path, "--aclfile", str(acl_file(tmp_path)))
    dure = Path(sys.executable).with_name("dure")

    def call(*argv: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [dure, "agent", *argv], capture_output=True, text=True, check=False, cwd=tmp_path
        )

    try:
        config = tmp_path / "server.toml"
        config.write_text(f'[edge]\nredis_url = "{server.url}"\nlease_ttl_s = 45.0\n')
        assert "no node name" in call("invite", "a*b", "--config", config).stderr
        line = call("invite", "pc-a", "--config", config).stdout
        secret = line.split()[-1]
        assert line == f"dure agent join {secret}\n"
        joined = call("join", secret, "--config", "pc.toml")
        assert joined.returncode == 0, joined.stderr
        made = tmp_path / "pc.toml"
        assert made.stat().st_mode & 0o077 == 0
        settings = load(made, {})
        assert (settings.node.name, settings.edge.lease_ttl_s) == ("pc-a", 45.0)
        assert "cannot be made" in call("join", secret, "--config", "pc.toml").stderr
        again = call("join", secret, "--config", "other.toml")
        assert (again.returncode, (tmp_path / "other.toml").exists()) == (2, False)
        assert "used already" in again.stderr
    finally:
        server.close()
