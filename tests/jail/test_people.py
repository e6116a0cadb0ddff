"""Two people on one machine: nothing of the one can be seen by the other's job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dure.adapters.compute.local.confinement import Confinement
from dure.adapters.compute.local.processes import descendants, processes
from dure.ports import LeaseKey
from tests.contract.backends import order
from tests.jail.rigs import IS_ROOT, OTHER, UID, JailRig, need_root

SECRET = "only-kim-knows-this"
TALKS = f"echo {SECRET} | tee result; touch ready; sleep 60"
LOOKS = """
import os, sys
found = []
def look(path):
    try:
        if os.path.isdir(path):
            found.append((path, os.listdir(path)))
        elif "only-kim-" + "knows-this" in open(path, errors="replace").read():
            found.append(path)
    except OSError:
        pass
for name in sys.argv[1:]:
    look(name)
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "maps"):
        look(f"/proc/{pid}/{name}")
print("FOUND", found)
"""


@pytest.fixture(params=["bubblewrap", "bubblewrap-root", "apptainer"])
def rig(request, make) -> JailRig:
    return make(request.param)


def test_a_job_sees_nothing_of_another_users(rig):
    rig.launch("bash", "-c", TALKS, env={"TOKEN": SECRET, "BEHAVIOUR": "x"})
    rig.wait((rig.out(1) / "ready").exists)
    rig.wait(lambda: SECRET in rig.log(1))
    one = rig.root / "1" / "1"
    paths = [one, one / "out" / "result", one / "log", one / "spec.json", rig.root, rig.root / "1"]
    pids = [pid for pid in rig.left() if pid != os.getpid()]
    files = [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "cmdline", "root/etc")]
    other = OTHER if rig.uid else 0
    text = rig.run(
        "python3", "-c", LOOKS, *map(str, paths), *files, job=2, unix_uid=other, user="lee"
    )
    found = text.split("FOUND ")[1].strip()
    # Its own way down to its own output folder is all there is.
    assert SECRET not in found
    assert "'1'" not in found.replace(f"['{rig.root}', ['2']]", "")
    assert "result" not in found
    rig.stop(1)
    rig.until(1, "Freed")


def test_outputs_belong_to_their_user_and_to_nobody_else(make):
    need_root()
    rig = make("bubblewrap-root")
    rig.run("bash", "-c", f"echo {SECRET} > result; umask 0; echo x > open")
    out = rig.out(1)
    assert {out.stat().st_uid, (out / "result").stat().st_uid} == {UID}
    assert out.stat().st_mode & 0o777 == 0o700
    rig.root.parent.chmod(0o755)
    for uid, code in ((OTHER, 1), (UID, 1)):
        # Not even its own user gets there outside: the folders above are the server's.
        done = subprocess.run(
            ["cat", str(out / "open")], user=uid, group=uid, extra_groups=[], check=False
        )
        assert done.returncode == code


def test_the_next_attempt_owns_what_it_starts_from(make):
    need_root()
    rig = make("bubblewrap-root")
    rig.run("bash", "-c", "mkdir deep; echo step 5 > deep/ckpt; ln -s /etc/shadow link; exit 1")
    script = ("bash", "-c", "cat deep/ckpt; echo 6 > deep/ckpt; rm link")
    again = order("job", 1, 2, command=script, unix_uid=UID, copy_from_epoch=1)
    rig.backend.launch([again])
    rig.until(1, "Freed", epoch=2)
    log = Path(rig.backend.log_path(LeaseKey(job=1, epoch=2))).read_text()
    assert log == "step 5\n"
    assert (rig.out(1, 2) / "deep" / "ckpt").stat().st_uid == UID
    assert (rig.out(1, 2) / "deep" / "ckpt").read_text() == "6\n"


def test_command_line_outside_shows_nothing(rig):
    rig.launch("bash", "-c", f"{TALKS} # {SECRET}", env={"TOKEN": SECRET})
    rig.wait((rig.out(1) / "ready").exists)
    below = descendants(processes(), rig.supervisor(1))
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in below]
    around = [x for x in lines if "bwrap" in x or "jobinit" in x or "apptainer" in x.lower()]
    assert len(around) >= 2
    assert not [line for line in around if SECRET in line]
    rig.stop(1)
    rig.until(1, "Freed")


def test_a_workdir_is_seen_and_not_written(make, tmp_path):
    rig = make("bubblewrap")
    work = rig.root.parent / "work"
    work.mkdir()
    (work / "train.py").write_text("print('trains')")
    rig.backend._confinement = _allow(rig, str(work), state=str(rig.root))
    text = rig.run("bash", "-c", "pwd; python3 train.py; touch x", workdir=str(work))
    assert text.splitlines()[:2] == [str(work), "trains"]
    assert "Read-only file system" in text


def test_the_servers_folder_is_hidden_in_a_workdir_around_it(make):
    rig = make("bubblewrap")
    work = rig.root.parent
    (work / "secret-of-the-server").write_text(SECRET)
    rig.backend._confinement = _allow(rig, str(work), state=str(rig.root))
    rig.backend._runtime._yard = rig.backend._runtime._yard.__class__(
        host=rig.backend._runtime._yard.host, state_dir=str(rig.root)
    )
    text = rig.run(
        "bash", "-c", f"ls {rig.root}; ls {rig.root}/1; touch $JOB_OUTPUT_DIR/ok", workdir=str(work)
    )
    assert text == "1\n1\n"
    assert (rig.out(1) / "ok").exists()


def _allow(rig: JailRig, *folders: str, state: str) -> Confinement:
    return Confinement(uid=os.getuid(), state_dir=state, workdirs=folders)


REFUSED = ["/", "/etc", "/etc/ssl", "/proc", "/var/lib", "/usr"]


@pytest.mark.parametrize("folder", REFUSED)
def test_folders_that_no_job_may_name(folder):
    doors = Confinement(uid=0, state_dir="/srv/dure")
    why = doors.unfit(order("x", 1, workdir=folder), confines=True)
    if not IS_ROOT and "cannot be read" in why:
        return
    assert "may not be shown to this job" in why


def test_hidden_folders_of_the_servers_home_stay_hidden(tmp_path):
    doors = Confinement(uid=os.getuid(), state_dir="/srv/dure", home=str(tmp_path))
    for name, may in (
        (".ssh", False),
        (".config/x", False),
        ("", False),
        ("project/.git", False),
        ("project", True),
    ):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        why = doors.unfit(order("x", 1, workdir=str(tmp_path / name)), confines=True)
        assert (why == "") is may, name


def test_a_link_to_the_servers_folder_is_no_way_in(tmp_path):
    state = tmp_path / "around" / "state"
    state.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "around")
    doors = Confinement(uid=os.getuid(), state_dir=str(state), workdirs=(str(tmp_path),))
    assert not doors.unfit(order("x", 1, workdir=str(tmp_path / "around")), confines=True)
    for folder in (state, state.parent / "state", link, link / "state"):
        assert doors.unfit(order("x", 1, workdir=str(folder)), confines=True), folder


def test_another_users_workdir_is_refused(tmp_path):
    need_root()
    doors = Confinement(uid=0, state_dir="/srv/dure")
    work = tmp_path / "work"
    work.mkdir()
    os.chown(work, OTHER, OTHER)
    assert doors.unfit(order("x", 1, workdir=str(work), unix_uid=UID), confines=True)
    assert not doors.unfit(order("x", 1, workdir=str(work), unix_uid=OTHER), confines=True)
    assert not doors.unfit(order("x", 1, workdir=str(work), unix_uid=UID), confines=False)
