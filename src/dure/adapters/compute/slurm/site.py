"""Where attempts live: shared folders that nodes read, and the server's own book of them.

`run_root/<job>/<epoch>/` belongs to the server (spec.json, stop.json: nobody else can plant
a file there), its folder `run/` to the job's account. `book/` is the server's alone.

Rule: what stands in `run/` was written by the job's account. It is opened without following
links and without waiting, and at most a mebibyte of it is read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pwd
import secrets
import shutil
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from dure.adapters.compute.local.leases import Shelf
from dure.adapters.compute.local.rundir import RunDir, Stop
from dure.ports import LaunchOrder, LeaseKey

log = logging.getLogger(__name__)
T = TypeVar("T")
READ_LIMIT = 1 << 20
PACKAGE = Path(__file__).resolve().parents[3]
"""The `dure` package: nodes run its supervisor from a copy on the shared storage."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The Unix account of a job."""

    uid: int
    gid: int
    name: str = ""
    home: str = "/"


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """What was launched and what Slurm said: enough to ask again after a crash."""

    order: LaunchOrder
    partition: str
    gres_type: str
    account: Account
    time_limit_min: int | None
    asked: bool = False
    """sbatch has been called at least once: a job may exist."""
    slurm_id: int = 0


class SlurmEnd(msgspec.Struct, frozen=True, kw_only=True):
    """`slurm-end.json`: whether Slurm itself sent SIGTERM before the end."""

    termed: bool = False


class SharedRun(RunDir):
    """A run directory that the job's account owns."""

    def _read(self, name: str, kind: type[T]) -> T | None:
        data = read_plainly(self.path / name)
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError:
            return None

    def slurm_end(self) -> SlurmEnd | None:
        """The batch job's last words."""
        return self._read("slurm-end.json", SlurmEnd)


def read_plainly(path: Path) -> bytes | None:
    """A small regular file, or None: never a link, a pipe or a device."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return file.read(READ_LIMIT)


class Site:
    """The folders of one installation."""

    def __init__(self, run_root: Path, state: Path) -> None:
        self.root = run_root
        self.book = Shelf(state / "book")
        self.id = self._identity(state / "id")
        self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.code = self._copy_code()

    @staticmethod
    def _identity(path: Path) -> str:
        """Random name in comments of Slurm jobs: two installations never adopt each other's."""
        if not path.exists():
            path.write_text(secrets.token_hex(6))
        return path.read_text().strip()

    def _copy_code(self) -> Path:
        """The package as it is now, for nodes that have only a Python."""
        files = sorted(PACKAGE.rglob("*.py"))
        digest = hashlib.sha256()
        for file in files:
            digest.update(str(file.relative_to(PACKAGE)).encode() + file.read_bytes())
        target = self.root / f"code-{digest.hexdigest()[:16]}"
        if target.is_dir():
            return target
        part = self.root / f"code-{secrets.token_hex(6)}.part"
        for file in files:
            copy = part / "dure" / file.relative_to(PACKAGE)
            copy.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        for path in (part, *part.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        try:
            part.rename(target)
        except OSError:
            shutil.rmtree(part)  # another server was first
        return target

    @property
    def batch(self) -> Path:
        """The program of the batch job."""
        return self.code / "dure" / "adapters" / "compute" / "slurm" / "batch.py"

    def attempt(self, key: LeaseKey) -> Path:
        """The attempt's folder, the server's."""
        return self.root / str(key.job) / str(key.epoch)

    def run(self, key: LeaseKey) -> SharedRun:
        """The job's own part of it."""
        return SharedRun(self.attempt(key) / "run")

    def comment(self, key: LeaseKey) -> str:
        """Stands at the Slurm job: by it a launch is found again."""
        return f"dure/{self.id}/{key.job}.{key.epoch}"

    def key_of(self, comment: str) -> LeaseKey | None:
        """The lease that a comment names, if it is of this installation."""
        mark = f"dure/{self.id}/"
        job, _, epoch = comment.removeprefix(mark).partition(".")
        if not comment.startswith(mark) or not (job.isdigit() and epoch.isdigit()):
            return None
        return msgspec.convert({"job": int(job), "epoch": int(epoch)}, LeaseKey)

    def prepare(self, key: LeaseKey, spec: bytes, account: Account) -> None:
        """Make the folders and `spec.json`; the job's account can read its own only."""
        folder = self.attempt(key)
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        folder.mkdir(mode=0o755, exist_ok=True)
        run = folder / "run"
        run.mkdir(mode=0o700, exist_ok=True)
        path = folder / "spec.json"
        replace(path, spec, 0o400, sync=False)
        if os.geteuid() == 0:
            for own in (run, path):
                os.chown(own, account.uid, account.gid)

    def earlier_output(self, key: LeaseKey, newest: int) -> str:
        """Newest output folder of an earlier attempt, from epoch `newest` down."""
        for epoch in range(min(newest, key.epoch - 1), 0, -1):
            out = self.run(LeaseKey(job=key.job, epoch=epoch)).out
            if out.is_dir() and not out.is_symlink():
                return str(out)
        return ""

    def record(self, key: LeaseKey, launched: Launched) -> None:
        """Write a launch down; what Slurm may know of must survive a power cut here."""
        folder = self.book.run(key).path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace(folder / "launch.json", msgspec.json.encode(launched), 0o600, sync=launched.asked)

    def order_stop(self, key: LeaseKey, stop: Stop) -> None:
        """Write a stop order where the batch job looks for it."""
        path = self.attempt(key) / "stop.json"
        try:
            replace(path, msgspec.json.encode(stop), 0o644)
        except OSError as error:  # a full disk must not keep others from being stopped
            log.warning("job %d: the stop order is not on disk: %s", key.job, error)

    def stop_order(self, key: LeaseKey) -> Stop | None:
        """The stop that was ordered, if one was."""
        try:
            data = (self.attempt(key) / "stop.json").read_bytes()
            return msgspec.json.decode(data, type=Stop)
        except (OSError, msgspec.MsgspecError):
            return None

    def launched(self, key: LeaseKey) -> Launched | None:
        """What was written down."""
        try:
            data = (self.book.run(key).path / "launch.json").read_bytes()
            return msgspec.json.decode(data, type=Launched)
        except (OSError, msgspec.MsgspecError):
            return None


def replace(path: Path, data: bytes, mode: int, *, sync: bool = True) -> None:
    """Replace a file whole, with `sync` durably, and readable to nobody else meanwhile."""
    part = path.with_name(f"{path.name}.new")
    part.unlink(missing_ok=True)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(fd)
    part.rename(path)


def account_of(name: str) -> Account | None:
    """The Unix account of that name on this machine."""
    try:
        found = pwd.getpwnam(name)
    except (KeyError, ValueError):
        return None
    return Account(uid=found.pw_uid, gid=found.pw_gid, name=found.pw_name, home=found.pw_dir)


def own_account() -> Account:
    """The account that this server runs under."""
    uid = os.geteuid()
    try:
        found = pwd.getpwuid(uid)
    except KeyError:
        return Account(uid=uid, gid=os.getegid())
    return Account(uid=uid, gid=os.getegid(), name=found.pw_name, home=found.pw_dir)
