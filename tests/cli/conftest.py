"""A stub server, and `dure` run against it as from a shell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dure.cli import cli
from dure.client import Client
from tests.cli.stub import TOKEN, Stub


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("DURE_", "LC_", "LANG")) or name in {"NO_COLOR", "FORCE_COLOR"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("dure.client.logs.SHORTEST_POLL_S", 0.01)
    monkeypatch.setattr("dure.client.logs.LONGEST_POLL_S", 0.02)
    monkeypatch.setattr("dure.client.transport.FIRST_PAUSE_S", 0.005)


@pytest.fixture
def server() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.close()


@pytest.fixture
def client(server: Stub) -> Iterator[Client]:
    with Client(server.url, TOKEN) as made:
        yield made


class Shell:
    """Runs the command line; stdout and stderr apart."""

    def __init__(self, server: Stub) -> None:
        self.server = server
        self.env: dict[str, str] = {"DURE_URL": server.url, "DURE_TOKEN": TOKEN}

    def __call__(self, *args: str, input: str | None = None) -> Result:  # noqa: A002
        result = CliRunner().invoke(cli, list(args), env=self.env, input=input, prog_name="dure")
        assert TOKEN not in result.output or "token" in args
        return result


@pytest.fixture
def dure(server: Stub) -> Shell:
    return Shell(server)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stdout count as a terminal of 120 columns."""
    monkeypatch.setattr("dure.cli.output.on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
