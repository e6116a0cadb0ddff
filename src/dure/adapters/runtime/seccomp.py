"""The system calls that a job may not make, as a classic BPF program. Pure.

Everything else is allowed: a filter that breaks training code is switched off by somebody
soon. What is refused opens the kernel or the host, and training needs none of it.
"""

from __future__ import annotations

import errno
import struct

ALLOW = 0x7FFF0000
ERRNO = 0x00050000
LOAD_WORD, JUMP_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x45, 0x06
OFFSET_NR, OFFSET_ARCH, OFFSET_ARGS = 0, 4, 16
X32_BIT = 0x40000000
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Names with their numbers on x86_64 and aarch64; 0: the call does not exist there.
REFUSED: dict[str, tuple[int, int]] = {
    "ioperm": (173, 0),
    "iopl": (172, 0),
    "syslog": (103, 116),
    "pivot_root": (155, 41),
    "acct": (163, 89),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "finit_module": (313, 273),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
}
# Programs that try these fall back to something older when the call is unknown.
UNKNOWN: dict[str, tuple[int, int]] = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Its flags lie behind a pointer that no filter can read; the C library then uses clone.
    "clone3": (435, 435),
}
CLONE, UNSHARE, IOCTL, SOCKET = (56, 220), (272, 97), (16, 29), (41, 198)
NEW_NAMESPACE = 0x7E020000
"""Every CLONE_NEW flag but the one of time, which shares its bit with an exit signal."""
NEW_TIME = 0x80
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6, netlink. Others (vsock, packet, alg) are not bound to a network namespace."""

Instruction = tuple[int, int, int, int]


def program(machine: str) -> bytes:
    """The filter for a machine as `os.uname` names it; empty where none is known."""
    if machine not in ARCHES:
        return b""
    which = list(ARCHES).index(machine)
    code: list[Instruction] = [
        (LOAD_WORD, 0, 0, OFFSET_ARCH),
        (JUMP_EQUAL, 1, 0, ARCHES[machine]),
        _refuse(errno.ENOSYS),  # a 32-bit call would go by other numbers
        (LOAD_WORD, 0, 0, OFFSET_NR),
        (JUMP_SET, 0, 1, X32_BIT),
        _refuse(errno.ENOSYS),
    ]
    for table, error in ((REFUSED, errno.EPERM), (UNKNOWN, errno.ENOSYS)):
        numbers = [pair[which] for pair in table.values() if pair[which]]
        code += _any_of(numbers, error)
    code += _masked(CLONE[which], 0, NEW_NAMESPACE)
    code += _masked(UNSHARE[which], 0, NEW_NAMESPACE | NEW_TIME)
    code += _ioctl(IOCTL[which])
    code += _socket(SOCKET[which])
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _refuse(error: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | error)


def _any_of(numbers: list[int], error: int) -> list[Instruction]:
    """Refuse if the loaded call number is one of these."""
    code: list[Instruction] = []
    for number in numbers:
        code += [(JUMP_EQUAL, 0, 1, number), _refuse(error)]
    return code


def _argument(index: int) -> Instruction:
    """Load the low half of an argument; both machines are little-endian."""
    return (LOAD_WORD, 0, 0, OFFSET_ARGS + 8 * index)


def _call(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run `body` for one call only; afterwards the call number is loaded again."""
    return [(JUMP_EQUAL, 0, len(body) + 1, number), *body, (LOAD_WORD, 0, 0, OFFSET_NR)]


def _masked(number: int, argument: int, bits: int) -> list[Instruction]:
    body = [_argument(argument), (JUMP_SET, 0, 1, bits), _refuse(errno.EPERM)]
    return _call(number, body)


def _ioctl(number: int) -> list[Instruction]:
    """Typing into the terminal that started the job, or into a console."""
    body = [_argument(1)]
    for request in (TIOCSTI, TIOCLINUX):
        body += [(JUMP_EQUAL, 0, 1, request), _refuse(errno.EPERM)]
    return _call(number, body)


def _socket(number: int) -> list[Instruction]:
    body = [_argument(0)]
    for left, family in enumerate(reversed(FAMILIES)):
        body.insert(1, (JUMP_EQUAL, left + 1, 0, family))
    return _call(number, [*body, _refuse(errno.EAFNOSUPPORT)])
