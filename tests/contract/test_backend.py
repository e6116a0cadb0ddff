"""What the engine may rely on with every compute backend."""

from __future__ import annotations

import msgspec
import pytest

from dure.ports import LaunchStatus, LeaseKey, LivePhase, StopKind, StopOrder
from tests.contract.backends import RIGS, Rig, order


@pytest.fixture(params=RIGS)
def rig(request, tmp_path):
    made = RIGS[request.param](tmp_path)
    yield made
    made.close()


def stop(rig: Rig, job: int, kill_after_s: float, kind: StopKind = StopKind.CANCEL) -> None:
    key = LeaseKey(job=job, epoch=1)
    rig.backend.stop([StopOrder(key=key, kind=kind, kill_after_s=kill_after_s)])


def statuses(results) -> list[LaunchStatus]:
    return [result.status for result in results]


def test_inventory_shows_the_node(rig):
    found = rig.backend.inventory()
    assert found.unreachable == ""
    (node,) = found.nodes
    assert (node.name, node.backend) == ("here", rig.backend.name)
    assert [(gpu.index, gpu.tier, gpu.simulated) for gpu in node.gpus] == [
        (i, "RTX4090", True) for i in range(4)
    ]


@pytest.mark.parametrize(
    ("what", "exit_code", "signal"),
    [("succeeds", 0, None), ("fails", 3, None), ("crashes", None, 11)],
)
def test_a_life_in_order(rig, what, exit_code, signal):
    begun = rig.clock.now_ms()
    (answer,) = rig.backend.launch([order(what, 1)])
    assert (answer.key, answer.status) == (LeaseKey(job=1, epoch=1), LaunchStatus.ACCEPTED)
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]
    times = [o.at_ms for o in rig.of(1)]
    assert begun - 20 <= times[0] <= times[1] <= times[2] <= rig.clock.now_ms() + 20
    evidence = rig.exited(1).evidence
    assert (evidence.exit_code, evidence.signal) == (exit_code, signal)


def test_exit_and_free_are_two_things(rig):
    rig.backend.launch([order("lingers", 1)])
    rig.until(1, "Exited")
    assert rig.freed(1).at_ms - rig.exited(1).at_ms >= 200


def test_launch_is_idempotent(rig):
    one = order("runs", 1)
    assert statuses(rig.backend.launch([one, one])) == [LaunchStatus.ACCEPTED] * 2
    rig.ready(1)
    assert statuses(rig.backend.launch([one])) == [LaunchStatus.ACCEPTED]
    stop(rig, 1, 5)
    rig.until(1, "Freed")
    assert statuses(rig.backend.launch([one])) == [LaunchStatus.ACCEPTED]
    rig.acknowledge()
    rig.sleep(0.2)
    assert rig.names(1) == []
    assert rig.starts(1) == 1


def test_refusal_has_a_reason_and_leaves_the_rest(rig):
    answers = rig.backend.launch([rig.refused_order(1), order("succeeds", 2)])
    assert statuses(answers) == [LaunchStatus.REFUSED, LaunchStatus.ACCEPTED]
    assert answers[0].reason
    rig.until(2, "Freed")
    assert rig.names(1) == []


def test_a_new_epoch_is_another_lease(rig):
    rig.backend.launch([order("fails", 1)])
    rig.until(1, "Freed")
    rig.backend.launch([order("succeeds", 1, epoch=2)])
    assert rig.until(1, "Freed", epoch=2) == ["Started", "Exited", "Freed"]
    assert rig.names(1) == ["Started", "Exited", "Freed"]


def test_stop_lets_it_save(rig):
    rig.backend.launch([order("saves", 1)])
    rig.ready(1)
    stop(rig, 1, 300)
    stop(rig, 1, 300)
    assert rig.exited(1).evidence.exit_code == 0
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]


def test_stop_kills_at_its_time_and_not_before(rig):
    rig.backend.launch([order("stubborn", 1)])
    rig.ready(1)
    begun = rig.clock.now_ms()
    stop(rig, 1, 0.5)
    end = rig.exited(1)
    assert end.evidence.signal == 9
    assert 480 <= end.at_ms - begun < 3000
    rig.until(1, "Freed")


def test_stop_after_the_end_changes_nothing(rig):
    rig.backend.launch([order("fails", 1)])
    rig.until(1, "Freed")
    stop(rig, 1, 0)
    rig.sleep(0.1)
    assert rig.names(1) == ["Started", "Exited", "Freed"]
    assert rig.exited(1).evidence.exit_code == 3


def test_unknown_keys_do_nothing(rig):
    stop(rig, 99, 1)
    rig.backend.fence([LeaseKey(job=98, epoch=1)])
    assert rig.look() == []
    assert rig.backend.leases() == []
    assert rig.backend.log_path(LeaseKey(job=97, epoch=1)) is None


def test_fenced_before_its_launch_never_starts(rig):
    rig.backend.fence([LeaseKey(job=1, epoch=1)])
    assert statuses(rig.backend.launch([order("succeeds", 1)])) == [LaunchStatus.REFUSED]
    rig.restart()
    assert statuses(rig.backend.launch([order("succeeds", 1)])) == [LaunchStatus.REFUSED]
    assert statuses(rig.backend.launch([order("succeeds", 1, epoch=2)])) == [LaunchStatus.ACCEPTED]
    rig.until(1, "Freed", epoch=2)
    assert rig.names(1) == []


def test_fenced_while_it_runs_is_silent(rig):
    rig.backend.launch([order("runs", 1)])
    rig.ready(1)
    rig.acknowledge()
    rig.backend.fence([LeaseKey(job=1, epoch=1)])
    assert rig.backend.leases() == []
    rig.sleep(0.5)
    assert rig.names(1) == []
    rig.restart()
    rig.sleep(0.2)
    assert rig.names(1) == []
    assert rig.backend.leases() == []


def test_nothing_is_forgotten_before_it_is_acknowledged(rig):
    rig.backend.launch([order("succeeds", 1)])
    rig.until(1, "Freed")
    again, cursor = rig.backend.observe(rig.cursor)
    assert rig.backend.observe(rig.cursor)[0][: len(again)] == again
    names = [type(o).__name__ for o in again if hasattr(o, "key")]
    assert [name for name in names if name != "Beat"] == ["Started", "Exited", "Freed"]
    assert [o for o in rig.backend.observe(cursor)[0] if hasattr(o, "key")] == []
    rig.cursor = cursor
    rig.backend.launch([order("fails", 2)])
    assert rig.until(2, "Freed") == ["Started", "Exited", "Freed"]
    assert rig.names(1) == []


def test_half_is_acknowledged(rig):
    rig.backend.launch([order("runs", 1)])
    rig.ready(1)
    rig.acknowledge()
    stop(rig, 1, 5)
    assert rig.until(1, "Freed") == ["Exited", "Freed"]


def test_phases_of_leases(rig):
    rig.backend.launch([order("runs", 1)])
    assert {lease.key for lease in rig.backend.leases()} == {LeaseKey(job=1, epoch=1)}
    rig.ready(1)
    assert [lease.phase for lease in rig.backend.leases()] == [LivePhase.RUNNING]
    stop(rig, 1, 5)
    rig.until(1, "Freed")
    assert {lease.phase for lease in rig.backend.leases()} <= {LivePhase.ENDED}


def test_restart_takes_up_what_runs(rig):
    rig.backend.launch([order("runs", 1), order("lingers", 2)])
    rig.ready(1)
    rig.until(2, "Freed")
    before = {o.key: o.at_ms for o in rig.look() if type(o).__name__ == "Started"}
    rig.restart()
    assert rig.until(1, "Started") == ["Started"]
    assert rig.until(2, "Freed") == ["Started", "Exited", "Freed"]
    after = {o.key: o.at_ms for o in rig.look() if type(o).__name__ == "Started"}
    for key, at_ms in before.items():
        assert abs(after[key] - at_ms) <= 50
    assert statuses(rig.backend.launch([order("runs", 1)])) == [LaunchStatus.ACCEPTED]
    stop(rig, 1, 5)
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]
    assert rig.starts(1) == (0 if rig.name == "simulated" else 1)


def test_a_cursor_of_an_earlier_life_loses_nothing(rig):
    rig.backend.launch([order("succeeds", 1)])
    rig.until(1, "Freed")
    rig.restart()
    assert rig.until(1, "Freed") == ["Started", "Exited", "Freed"]


def test_values_survive_json(rig):
    rig.backend.launch([order("fails", 1)])
    rig.until(1, "Freed")
    for seen in rig.look():
        assert msgspec.json.decode(msgspec.json.encode(seen), type=type(seen)) == seen
