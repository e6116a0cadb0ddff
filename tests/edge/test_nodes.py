"""Nodes that are killed, shut down, cut off, stopped: real agents in real networks.

Every duration is a thirtieth of the product's (`site.EDGE`); the bounds are the protocol's
own for these numbers, with a second for a busy machine.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest

from dure.core.invariants import World, check_world
from dure.core.model import NodeHealth
from tests.edge.site import SILENT_S, TTL_S, Site, why_no_namespaces

AIR_S = 1.0
WHY_NOT = why_no_namespaces() or ("" if shutil.which("redis-server") else "no redis-server")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
COUNT = 'for i in $(seq {n}); do echo $i >> "$JOB_OUTPUT_DIR/steps"; sleep 0.1; done'


def steps(n: int) -> str:
    """A job that says what it does, every tenth of a second."""
    return COUNT.format(n=n)


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    yield made
    try:
        with made.store.read() as tx:
            world = World(
                jobs=tuple(tx.all_jobs()),
                attempts=tuple(tx.all_attempts()),
                ledger=tuple(tx.ledger()),
                labs=tuple(tx.labs()),
                now_ms=made.engine.clock.now_ms(),
                half_life_ms=made.policy.half_life_ms,
            )
        assert check_world(world) == []
    finally:
        made.close()


def written(site: Site, agent: str, job: int, epoch: int = 1) -> list[str]:
    path = site.agents[agent].runs / str(job) / str(epoch) / "out" / "steps"
    return path.read_text().split() if path.exists() else []


def test_a_job_runs_and_its_log_comes_back(site):
    site.agent("a")
    job = site.submit("echo hello from $JOB_ID; exit 0")
    site.until_state(job, "COMPLETED")
    path = site.edge.backend.log_path(site_key(job))
    assert Path(path).read_text() == f"hello from {job}\n"
    site.until(lambda: site.attempts(job)[0].freed_ms, "its GPU is free")
    failed = site.submit("exit 3")
    site.until_state(failed, "FAILED")
    assert site.job(failed).exit_code == 3


def test_cancel_is_rung_not_waited_for(site):
    site.agent("a")
    job = site.submit(f"trap 'exit 0' TERM; {steps(300)}")
    site.until_state(job, "RUNNING")
    from dure.engine import commands

    begun = time.monotonic()
    commands.cancel(site.engine, site.user, job)
    site.until_state(job, "CANCELLED")
    assert time.monotonic() - begun < AIR_S + 0.2


def test_killed_agent_is_noticed_and_its_job_goes_on(site):
    agent = site.agent("a")
    job = site.submit(steps(45))
    site.until_state(job, "RUNNING")
    agent.kill()
    # Noticed by its closed connection; nobody listens at its port any more: grace, 2 probes.
    took = site.until(lambda: site.health("a") is NodeHealth.OFFLINE, "OFFLINE")
    assert took <= 0.1 + 0.3 + 0.2 + 2 * 0.1 + AIR_S
    agent.start()
    site.until_state(job, "COMPLETED")
    assert (site.job(job).epoch, site.job(job).retries, len(site.attempts(job))) == (1, 0, 1)
    assert len(written(site, "a", job)) == 45


def test_killed_agent_that_never_returns_costs_no_retry(site):
    agent = site.agent("a")
    job = site.submit(steps(300))
    site.until_state(job, "RUNNING")
    agent.kill()
    took = site.until_state(job, "NODE_WAIT")
    assert took <= TTL_S + 2 + AIR_S
    assert site.job(job).retries == 0
    assert site.hash(f"dure:task:{job}")["status"] == "NODE_WAIT"


def test_shutdown_returns_its_work_at_once(site):
    agent = site.agent("a")
    job = site.submit(f"{steps(300)}")
    site.until_state(job, "RUNNING")
    site.until(lambda: len(written(site, "a", job)) > 3, "some steps")
    agent.send(signal.SIGTERM)
    assert site.until(lambda: site.health("a") is NodeHealth.OFFLINE, "OFFLINE") <= 1.0
    site.until_state(job, "NODE_WAIT", limit_s=1.5)
    assert agent.wait() == 0
    assert agent.jobs() == []
    assert (site.job(job).retries, site.job(job).node_lost_count) == (0, 0)
    before = len(written(site, "a", job))
    agent.start()
    site.until(lambda: site.job(job).epoch == 2, "dispatched anew")
    site.until_state(job, "RUNNING")
    # The second attempt finds what the first one has written.
    site.until(lambda: len(written(site, "a", job, 2)) > before, "it goes on")
    assert written(site, "a", job, 2)[:before] == written(site, "a", job)[:before]


def test_restart_of_the_agent_is_no_loss(site):
    agent = site.agent("a")
    job = site.submit(steps(40))
    site.until_state(job, "RUNNING")
    agent.send(signal.SIGUSR1)
    assert agent.wait() == 0
    site.until(lambda: site.health("a") is NodeHealth.SUSPECTED, "no new work meanwhile")
    agent.start()
    site.until_state(job, "COMPLETED")
    assert (site.job(job).epoch, len(written(site, "a", job))) == (1, 40)


def test_silent_loss_is_noticed_in_time(site):
    agent = site.agent("a")
    agent.network.pull()
    took = site.until(lambda: site.health("a") is NodeHealth.OFFLINE, "OFFLINE")
    assert took <= SILENT_S + AIR_S
    agent.network.plug()
    site.until(lambda: site.takes_work("a"), "back in service")


def test_a_blip_costs_no_gpu_work(site):
    """Cut off for longer than a lease lives, nobody else to take it: the same process goes on."""
    agent = site.agent("a")
    job = site.submit(steps(90))
    site.until_state(job, "RUNNING")
    agent.network.pull()
    site.until_state(job, "NODE_WAIT")
    agent.network.plug()
    site.until_state(job, "RUNNING", "COMPLETED")
    site.until_state(job, "COMPLETED")
    assert (site.job(job).epoch, site.job(job).retries) == (1, 0)
    assert written(site, "a", job) == [str(i) for i in range(1, 91)]


def test_a_short_cut_is_not_even_a_wait(site):
    agent = site.agent("a")
    job = site.submit(steps(35))
    site.until_state(job, "RUNNING")
    agent.network.pull()
    time.sleep(1.2)
    agent.network.plug()
    site.until_state(job, "COMPLETED")
    assert len(site.attempts(job)) == 1
    assert len(written(site, "a", job)) == 35


def test_result_of_a_node_that_was_away_still_counts(site):
    """It ended while the node was cut off; nobody had taken it over."""
    agent = site.agent("a")
    job = site.submit(steps(10))
    site.until_state(job, "RUNNING")
    agent.network.pull()
    site.until_state(job, "NODE_WAIT")
    assert len(written(site, "a", job)) == 10
    agent.network.plug()
    site.until_state(job, "COMPLETED")
    assert site.job(job).epoch == 1


def test_work_moves_on_and_the_old_node_is_stopped(site):
    old = site.agent("a")
    job = site.submit(steps(150))
    site.until_state(job, "RUNNING")
    site.agent("b")
    old.network.pull()
    site.until(lambda: site.job(job).epoch == 2, "given to another node")
    site.until_state(job, "RUNNING")
    assert old.jobs(), "the old process still runs, and does not know"
    old.network.plug()
    site.until(lambda: not old.jobs(), "told that it has lost its lease")
    assert site.state(job) == "RUNNING"
    assert site.attempts(job)[1].placement.node == "b"
    assert site.job(job).retries == 0


def test_stopped_and_continued_agent(site):
    agent = site.agent("a")
    job = site.submit(steps(80))
    site.until_state(job, "RUNNING")
    agent.send(signal.SIGSTOP)
    # Its connection lives and its port is open: only its silence tells.
    took = site.until(lambda: site.health("a") is NodeHealth.OFFLINE, "OFFLINE")
    assert took <= SILENT_S + AIR_S
    site.until_state(job, "NODE_WAIT")
    agent.send(signal.SIGCONT)
    site.until_state(job, "COMPLETED")
    assert (site.job(job).epoch, len(written(site, "a", job))) == (1, 80)


def test_redis_down_fails_nothing(site):
    site.agent("a")
    job = site.submit(steps(100))
    site.until_state(job, "RUNNING")
    site.redis.crash()
    time.sleep(TTL_S + 1)
    assert site.edge.backend.inventory().unreachable
    waiting = site.submit("echo later")
    site.redis.start()
    site.until_state(job, "COMPLETED")
    site.until_state(waiting, "COMPLETED")
    assert (site.job(job).epoch, site.job(job).retries, len(site.attempts(job))) == (1, 0, 1)
    assert site.health("a") is NodeHealth.STABLE


def test_control_plane_away_fails_nothing(site):
    site.agent("a")
    job = site.submit(steps(25))
    site.until_state(job, "RUNNING")
    site.stop()
    time.sleep(TTL_S + 0.5)
    site.start()
    site.until_state(job, "COMPLETED")
    assert (site.job(job).epoch, len(site.attempts(job))) == (1, 1)


def test_order_that_the_node_refuses_goes_back_with_its_reason(site):
    site.agent("a")
    job = site.submit("true", workdir="/no/such/folder")
    site.until(lambda: site.job(job).refusals >= 1, "refused")
    assert "/no/such/folder" in site.attempts(job)[0].detail
    assert site.job(job).retries == 0


def site_key(job: int):
    from dure.ports import LeaseKey

    return LeaseKey(job=job, epoch=1)
