"""Command lines of the runtimes as data: what is shown, what is hidden, who it becomes."""

from __future__ import annotations

import json

import pytest

from dure.adapters.runtime import choose as choosing
from dure.adapters.runtime import jail
from dure.adapters.runtime.apptainer import ApptainerRuntime
from dure.adapters.runtime.bubblewrap import ARGS_FD, PASSWD_FD, BubblewrapRuntime
from dure.adapters.runtime.host import Host
from dure.adapters.runtime.jail import Yard
from dure.core.errors import DureError
from dure.ports import Grant, RuntimeCommand
from tests.contract.backends import order

HOST = Host(
    links=(("/bin", "usr/bin"),),
    folders=("/usr", "/opt/py"),
    python="/opt/py/bin/python3",
    package="/opt/dure/lib/dure",
    machine="x86_64",
)
YARD = Yard(host=HOST, state_dir="/srv/dure", shared=("/data",))
OUT = "/srv/dure/runs/1/1/out"
SECRET = "hunter2"


def grant(**fields: object) -> Grant:
    values = {"run_dir": "/srv/dure/runs/1/1", "output_dir": OUT, "gpu_uuids": ("GPU-1",)}
    return Grant(**{**values, "cores": 3, "memory_mib": 100, **fields})


def bubble(uid: int = 1000, version: tuple[int, ...] = (0, 8), **fields: object) -> RuntimeCommand:
    runtime = BubblewrapRuntime(YARD, program="/usr/bin/bwrap", version=version, uid=uid)
    workdir = str(fields.pop("workdir", ""))
    wanted = order("train", 1, env={"TOKEN": SECRET}, workdir=workdir)
    return runtime.command(wanted, grant(**fields))


def words(command: RuntimeCommand) -> list[str]:
    return command.files[ARGS_FD].decode().split("\0")[:-1]


def after(args: list[str], name: str, count: int = 2) -> list[tuple[str, ...]]:
    """Arguments that follow each `name`."""
    return [tuple(args[i + 1 : i + 1 + count]) for i, arg in enumerate(args) if arg == name]


def test_it_is_a_function_of_its_arguments():
    assert bubble() == bubble()


def test_command_line_shows_nothing_of_the_job():
    command = bubble(workdir="/projects/kim")
    shown = " ".join(command.argv) + str(command.env)
    assert SECRET not in shown
    assert "/projects/kim" not in shown
    assert command.inside.env["TOKEN"] == SECRET


def test_own_output_alone_is_writable():
    args = words(bubble(workdir="/projects/kim"))
    assert after(args, "--bind") == [(OUT, OUT)]
    shown = {target for _, target in after(args, "--ro-bind")}
    assert shown == {"/usr", "/opt/py", "/data", "/projects/kim", jail.PACKAGE}
    assert args[-4:] == ["--remount-ro", "/", "--chdir", "/"]
    assert bubble(workdir="/projects/kim").inside.cwd == "/projects/kim"
    assert bubble().inside.cwd == OUT


def test_parents_are_mounted_before_what_lies_in_them():
    args = words(bubble(workdir="/srv"))
    assert args.index("/srv") < args.index("/srv/dure") < args.index(OUT)
    assert ("/srv/dure",) in after(args, "--tmpfs", 1)
    assert ("/srv/dure",) in after(args, "--remount-ro", 1)


def test_namespaces_and_users():
    plain, root = words(bubble(uid=1000)), words(bubble(uid=0))
    for args in (plain, root):
        assert {"--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-user"} <= set(args)
        assert ("ALL",) in after(args, "--cap-drop", 1)
        assert not after(args, "--cap-add", 1)
    # Root's own user could write kernel settings; and a job should not think it is root.
    assert ("/proc/sys", "/proc/sys") in after(root, "--ro-bind-try")
    assert after(root, "--uid", 1) == [("1000",)]
    assert after(plain, "--uid", 1) == []


def test_another_user_needs_no_user_namespace():
    runtime = BubblewrapRuntime(YARD, program="bwrap", uid=0)
    command = runtime.command(order("train", 1), grant(uid=20_001))
    args = words(command)
    assert "--unshare-user" not in args
    assert {x for (x,) in after(args, "--cap-add", 1)} == {
        "CAP_SETUID",
        "CAP_SETGID",
        "CAP_SETPCAP",
    }
    assert command.inside.uid == 20_001
    assert b"job:x:20001:20001" in command.files[PASSWD_FD]


def test_own_gpus_alone():
    args = words(bubble(devices=("/dev/nvidia1", "/dev/nvidiactl")))
    assert after(args, "--dev-bind") == [
        ("/dev/nvidia1", "/dev/nvidia1"),
        ("/dev/nvidiactl", "/dev/nvidiactl"),
    ]
    assert ("/sys", "/sys") in after(args, "--ro-bind")
    assert ("/sys", "/sys") not in after(words(bubble()), "--ro-bind")


def test_old_bubblewrap_gets_no_option_that_it_does_not_know():
    assert "--size" in words(bubble())
    assert "--size" not in words(bubble(version=(0, 6)))


def test_apptainer_is_told_the_same(tmp_path):
    runtime = ApptainerRuntime(YARD, program="/usr/bin/apptainer", root="/root-fs", uid=0)
    command = runtime.command(order("train", 1, env={"TOKEN": SECRET}), grant(uid=20_001))
    orders = json.loads(command.files[4])
    assert SECRET not in str(orders) + str(command.argv) + str(command.env)
    assert [b["target"] for b in orders["binds"] if b["writable"]] == [OUT]
    assert orders["uid"] == 20_001
    assert {"--containall", "--no-home", "--cleanenv", "none"} <= set(orders["before"])


# -- which one -----------------------------------------------------------------------


def test_a_runtime_that_was_asked_for_and_does_not_work_stops_the_start(monkeypatch):
    monkeypatch.setattr(choosing.shutil, "which", lambda name: None)
    for name in ("bubblewrap", "apptainer"):
        with pytest.raises(DureError) as refusal:
            choosing.choose(name, YARD)
        assert "is not installed" in str(refusal.value.params["value"])


def test_auto_falls_back_and_says_why(monkeypatch):
    monkeypatch.setattr(choosing.shutil, "which", lambda name: None)
    found = choosing.choose("auto", YARD)
    assert (found.runtime.name, found.runtime.confines) == ("process", False)
    assert found.passed == (
        "bubblewrap: bwrap is not installed",
        "apptainer: apptainer is not installed",
    )


def test_a_jail_that_cannot_be_made_here_is_passed_over(monkeypatch, tmp_path):
    bad = tmp_path / "bwrap"
    bad.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo bubblewrap 0.9.0 && exit 0\n'
        'echo "bwrap: No permissions to create new namespace" >&2\nexit 1\n'
    )
    bad.chmod(0o755)
    monkeypatch.setattr(
        choosing.shutil, "which", lambda name: str(bad) if name == "bwrap" else None
    )
    found = choosing.choose("auto", YARD)
    assert "No permissions to create new namespace" in found.passed[0]
    bad.write_text("#!/bin/sh\necho bubblewrap 0.3.1\n")
    assert "older than 0.5" in choosing.choose("auto", YARD).passed[0]
