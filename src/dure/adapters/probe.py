"""Ways to ask whether a node is there: its agent's own answer, TCP, ICMP, Tailscale.

Each answers within its time limit and never raises. A refused connection says that the
machine lives and its agent does not.
"""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
from collections.abc import Sequence

from dure.core.health import Signal
from dure.ports import Prober


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`; port 0: none was given."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.startswith("[")):
        return address.strip("[]"), 0
    return host.strip("[]"), int(port)


class TcpProbe:
    """Whether somebody listens there."""

    def __init__(self, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s

    def probe(self, address: str) -> Signal:
        """One connection."""
        host, port = split(address)
        if not host or not port:
            return Signal.PROBE_FAILED
        try:
            with socket.create_connection((host, port), timeout=self._timeout_s):
                return Signal.PROBE_OK
        except ConnectionRefusedError:
            return Signal.PROBE_REFUSED
        except (OSError, ValueError):
            return Signal.PROBE_FAILED


class HttpProbe:
    """The agent's own health answer."""

    def __init__(self, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s

    def probe(self, address: str) -> Signal:
        """`GET /healthz`."""
        host, port = split(address)
        if not host or not port:
            return Signal.PROBE_FAILED
        link = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        try:
            link.request("GET", "/healthz")
            return Signal.PROBE_OK if link.getresponse().status == 200 else Signal.PROBE_FAILED
        except ConnectionRefusedError:
            return Signal.PROBE_REFUSED
        except (OSError, ValueError, http.client.HTTPException):
            return Signal.PROBE_FAILED
        finally:
            link.close()


class CommandProbe:
    """A program that exits 0 when the host answers; `{host}` stands for its name."""

    def __init__(self, argv: Sequence[str], timeout_s: float = 2.0) -> None:
        self._argv = tuple(argv)
        self._timeout_s = timeout_s

    def probe(self, address: str) -> Signal:
        """Run it once. A host that looks like an option is none."""
        host, _ = split(address)
        if not host or host.startswith("-"):
            return Signal.PROBE_FAILED
        argv = [part.replace("{host}", host) for part in self._argv]
        try:
            done = subprocess.run(  # noqa: S603 - no shell, and the host is one argument
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._timeout_s + 1,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired, ValueError):
            return Signal.PROBE_FAILED
        return Signal.PROBE_OK if done.returncode == 0 else Signal.PROBE_FAILED


def prober(kind: str, timeout_s: float = 2.0) -> Prober:
    """The probe that a setting names."""
    seconds = str(max(1, round(timeout_s)))
    if kind == "icmp":
        return CommandProbe(["ping", "-n", "-c", "1", "-W", seconds, "{host}"], timeout_s)
    if kind == "tailscale":
        argv = ["tailscale", "ping", "--c", "1", "--timeout", f"{seconds}s", "{host}"]
        return CommandProbe(argv, timeout_s)
    return TcpProbe(timeout_s) if kind == "tcp" else HttpProbe(timeout_s)


def missing_program(kind: str) -> str:
    """The program that a probe needs and this machine lacks; empty if none."""
    program = {"icmp": "ping", "tailscale": "tailscale"}.get(kind, "")
    return program if program and shutil.which(program) is None else ""
