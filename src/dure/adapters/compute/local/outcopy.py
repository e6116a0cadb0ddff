"""Copy of an earlier attempt's output folder: `python -I -S outcopy.py FROM TO UID`.

Rule: standard library only, like the supervisor that runs it. The copy is made beside TO
and renamed, so that TO is whole or absent. Links are kept as links and never followed.
"""
# ruff: noqa: PTH102, PTH104 - works relative to open folders, which pathlib cannot

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import signal
import stat
import sys

FICLONE = 0x40049409
PARENT_DIED = 1
"""PR_SET_PDEATHSIG: a copy is of no use without the supervisor that waits for it."""
ELSEWHERE = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY)


def copy_data(source: int, target: int) -> None:
    """Share the blocks if the file system can, else copy them."""
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:
        pass
    else:
        return
    try:
        while os.copy_file_range(source, target, 1 << 30):
            pass
    except OSError as error:
        if error.errno not in ELSEWHERE:
            raise
        with os.fdopen(source, "rb", closefd=False) as left:
            left.seek(0)
            with os.fdopen(target, "wb", closefd=False) as right:
                shutil.copyfileobj(left, right, 1 << 20)


def copy_file(name: str, source: int, target: int) -> None:
    """One regular file with its mode and time; what became something else is left out."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    left = os.open(name, flags, dir_fd=source)
    try:
        info = os.fstat(left)
        if not stat.S_ISREG(info.st_mode):
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        right = os.open(name, flags, 0o600, dir_fd=target)
        try:
            copy_data(left, right)
            os.fchmod(right, stat.S_IMODE(info.st_mode) & 0o777)
            os.utime(right, ns=(info.st_atime_ns, info.st_mtime_ns))
        finally:
            os.close(right)
    finally:
        os.close(left)


def copy_folder(source: int, target: int) -> None:
    """Everything in an open folder into another one."""
    with os.scandir(source) as entries:
        found = list(entries)
    for entry in found:
        try:
            if entry.is_symlink():
                link = os.readlink(entry.name, dir_fd=source)
                os.symlink(link, entry.name, dir_fd=target)
            elif entry.is_dir(follow_symlinks=False):
                copy_below(entry.name, source, target)
            elif entry.is_file(follow_symlinks=False):
                copy_file(entry.name, source, target)
        except OSError as error:
            # Gone meanwhile, swapped for a link, or closed to its owner: not ours to judge.
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.ENOTDIR):
                raise
            print(f"dure: not copied: {entry.name}: {error.strerror}", file=sys.stderr)  # noqa: T201


def copy_below(name: str, source: int, target: int) -> None:
    """One folder inside another."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    left = os.open(name, flags, dir_fd=source)
    try:
        os.mkdir(name, 0o700, dir_fd=target)
        right = os.open(name, flags, dir_fd=target)
        try:
            copy_folder(left, right)
            os.fchmod(right, (stat.S_IMODE(os.fstat(left).st_mode) & 0o777) | 0o700)
        finally:
            os.close(right)
    finally:
        os.close(left)


def main(source: str, target: str, uid: int) -> int:
    """Make `target` a copy of `source`; 1 with a line on stderr if that cannot be.

    With `uid` the copy is made as that user (0: as this one), who then owns it.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1
    os.umask(0o077)
    part = f"{target}.part"
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        shutil.rmtree(part, ignore_errors=True)
        os.mkdir(part, 0o700)
        left, right = os.open(source, flags), os.open(part, flags)
        if uid:
            os.fchown(right, uid, uid)
            os.setgroups([])
            os.setegid(uid)
            os.seteuid(uid)
        copy_folder(left, right)
        if uid:
            os.seteuid(0)
        os.rename(part, target)
    except OSError as error:
        print(f"dure: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
