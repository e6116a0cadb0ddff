"""Attacks on other people's files and over the network. See `table` for the rules."""
# ruff: noqa: PTH118, PTH123, PTH208 - few imports

from __future__ import annotations

import os
import socket

from dure.adapters.runtime.attack.table import attack, makes, opens, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TIMEOUT_S = 2

# -- other people's files ------------------------------------------------------------


@attack("files: read another user's readable file")
def _other_readable(t: dict[str, Any]) -> object:
    return t["secret"] in text(t["other_644"])


@attack("files: read another user's job output")
def _other_output(t: dict[str, Any]) -> object:
    return t["secret"] in text(t["other_output"])


@attack("files: read another user's job log")
def _other_log(t: dict[str, Any]) -> object:
    return t["secret"] in text(t["other_log"])


@attack("files: read the output of an own other job")
def _own_other(t: dict[str, Any]) -> object:
    return t["secret"] in text(t["own_other_job"])


@attack("files: read the server's database")
def _database(t: dict[str, Any]) -> object:
    return t["secret"] in text(t["database"])


@attack("files: read the server's environment of this job (spec.json)")
def _spec(t: dict[str, Any]) -> object:
    return opens(os.path.join(t["run_dir"], "spec.json"))


@attack("files: talk to the supervisor's socket")
def _supervisor(t: dict[str, Any]) -> object:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.path.join(t["run_dir"], "ctl.sock"))
    return True


@attack("files: list the home folders")
def _homes(t: dict[str, Any]) -> object:
    return [name for name in os.listdir(t["homes"]) if name != "job"]


@attack("files: write the workdir")
def _workdir(t: dict[str, Any]) -> object:
    return makes(t["workdir"])


for _folder in ("/", "/usr", "/etc", "/opt", "/var", "/run"):

    @attack(f"files: write {_folder}")
    def _write(t: dict[str, Any], folder: str = _folder) -> object:
        del t
        return makes(folder)


@attack("files: leave something in the machine's /tmp")
def _tmp(t: dict[str, Any]) -> object:
    open(t["left_tmp"], "w", encoding="ascii").close()
    return "on the machine" if t["control"] else ""  # the stage looks


@attack("files: leave something in the machine's /dev/shm")
def _shm(t: dict[str, Any]) -> object:
    open(t["left_shm"], "w", encoding="ascii").close()
    return "on the machine" if t["control"] else ""  # the stage looks


@attack("files: read /etc/shadow")
def _shadow(t: dict[str, Any]) -> object:
    del t
    return opens("/etc/shadow")


# -- network -------------------------------------------------------------------------


def fetch(host: str, port: int) -> bool:
    """Connect and read the greeting."""
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as sock:
        return bool(sock.recv(16))


@attack("network: TCP to another machine")
def _tcp_outside(t: dict[str, Any]) -> object:
    return fetch(t["outside"], t["outside_port"])


@attack("network: TCP to the machine's own address")
def _tcp_machine(t: dict[str, Any]) -> object:
    return fetch(t["address"], t["port"])


@attack("network: TCP to a service on the machine's loopback")
def _tcp_loopback(t: dict[str, Any]) -> object:
    return fetch("127.0.0.1", t["port"])


@attack("network: UDP to another machine")
def _udp(t: dict[str, Any]) -> object:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return sock.sendto(b"x", (t["outside"], 9))


@attack("network: raw socket")
def _raw(t: dict[str, Any]) -> object:
    del t
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return True


@attack("network: packet socket")
def _packet(t: dict[str, Any]) -> object:
    del t
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    return True


@attack("network: socket of a family that no namespace holds")
def _families(t: dict[str, Any]) -> object:
    del t
    for family in (38, 40, 31, 30, 21, 29, 44, 17):  # alg, vsock, bluetooth, tipc, …
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
            try:
                socket.socket(family, kind).close()
            except OSError:
                continue
            return family
    return None


@attack("network: abstract unix socket of the machine")
def _abstract(t: dict[str, Any]) -> object:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + t["abstract"])
        return bool(sock.recv(16))


@attack("network: unix socket in the machine's file system")
def _unix(t: dict[str, Any]) -> object:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(t["unix"])
        return bool(sock.recv(16))
