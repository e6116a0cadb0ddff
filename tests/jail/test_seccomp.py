"""The filter's program, run by a small interpreter: on both machines, call by call."""

from __future__ import annotations

import errno
import struct

import pytest

from dure.adapters.runtime import seccomp

ALLOWED = "allowed"


def ask(machine: str, number: int, *arguments: int, arch: int | None = None) -> str | int:
    """What the kernel would answer: ALLOWED or an error number."""
    code = seccomp.program(machine)
    data = struct.pack("=IIQ", number, seccomp.ARCHES[machine] if arch is None else arch, 0)
    data += struct.pack("=6Q", *(list(arguments) + [0] * 6)[:6])
    program = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    at, register = 0, 0
    while True:
        what, jump_true, jump_false, value = program[at]
        at += 1
        if what == seccomp.LOAD_WORD:
            (register,) = struct.unpack_from("=I", data, value)
        elif what == seccomp.RETURN:
            return ALLOWED if value == seccomp.ALLOW else value & 0xFFFF
        else:
            equal = register == value if what == seccomp.JUMP_EQUAL else bool(register & value)
            at += jump_true if equal else jump_false


@pytest.mark.parametrize("machine", seccomp.ARCHES)
def test_every_call_of_the_tables(machine):
    which = list(seccomp.ARCHES).index(machine)
    for table, error in ((seccomp.REFUSED, errno.EPERM), (seccomp.UNKNOWN, errno.ENOSYS)):
        for name, numbers in table.items():
            if numbers[which]:
                assert ask(machine, numbers[which]) == error, name


@pytest.mark.parametrize("machine", seccomp.ARCHES)
def test_everything_else_is_allowed(machine):
    which = list(seccomp.ARCHES).index(machine)
    refused = {n[which] for t in (seccomp.REFUSED, seccomp.UNKNOWN) for n in t.values()}
    special = {
        pair[which] for pair in (seccomp.CLONE, seccomp.UNSHARE, seccomp.IOCTL, seccomp.SOCKET)
    }
    for number in set(range(460)) - refused - special:
        assert ask(machine, number) == ALLOWED, number


@pytest.mark.parametrize("machine", seccomp.ARCHES)
def test_calls_by_their_arguments(machine):
    which = list(seccomp.ARCHES).index(machine)
    clone, unshare, ioctl, sock = (
        pair[which] for pair in (seccomp.CLONE, seccomp.UNSHARE, seccomp.IOCTL, seccomp.SOCKET)
    )
    thread = 0x3D0F00
    assert ask(machine, clone, thread) == ALLOWED
    assert ask(machine, clone, 17) == ALLOWED  # fork: SIGCHLD
    for flag in (0x20000, 0x10000000, 0x40000000):
        assert ask(machine, clone, thread | flag) == errno.EPERM
        assert ask(machine, unshare, flag) == errno.EPERM
    assert ask(machine, unshare, 0x400) == ALLOWED  # its own table of files
    assert ask(machine, ioctl, 1, 0x5413) == ALLOWED
    assert ask(machine, ioctl, 1, 0x5412) == errno.EPERM
    # The kernel looks at the low half only; so must the filter.
    assert ask(machine, ioctl, 1, 0x5412 | 1 << 40) == errno.EPERM
    for family in range(50):
        expected = ALLOWED if family in seccomp.FAMILIES else errno.EAFNOSUPPORT
        assert ask(machine, sock, family) == expected


def test_other_numbers_of_the_same_machine_are_refused():
    i386 = 0x40000003
    assert ask("x86_64", 20, arch=i386) == errno.ENOSYS
    assert ask("x86_64", 0x40000000 | 39) == errno.ENOSYS


def test_unknown_machines_have_no_filter():
    assert seccomp.program("riscv64") == b""
