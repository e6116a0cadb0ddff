"""`dure server`: HTTP in front, the controller's loop behind, until it is told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click
import structlog
import uvicorn

from dure import __version__
from dure.adapters.clock import SystemIds
from dure.api.app import create_app
from dure.settings import Settings
from dure.wiring.build import Installation


def configure_logging() -> None:
    """One JSON object a line on stderr; coloured text on a terminal."""
    renderer: structlog.types.Processor = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class Server(uvicorn.Server):
    """Says where it listens once it does, and writes the address for scripts."""

    def __init__(
        self, config: uvicorn.Config, address_file: Path, on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._address_file = address_file
        self._on_stop = on_stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop in order on SIGTERM and SIGINT, and end with 0.

        Uvicorn's own raises the signal again afterwards, which would end the process before
        the controller and the backends are closed.
        """
        both = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self.handle_exit) for number in both}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the stop: streams end at once, so that nothing holds it up."""
        self._on_stop()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then tell the address (port 0 is known only now)."""
        await super().startup(sockets)
        if not self.servers:
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        shown = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        half = self._address_file.with_suffix(".half")
        half.write_text(shown + "\n")
        half.replace(self._address_file)
        click.echo(f"Dure {__version__} listens on {shown}", err=True)


def serve(settings: Settings) -> int:
    """Run one server in the foreground; SIGTERM and SIGINT stop it, jobs go on."""
    configure_logging()
    installation = Installation(settings)
    try:
        secret = installation.register()
        _tell_first_start(installation, secret)
        app = create_app(
            installation.engine, installation.controller, settings=settings, ids=SystemIds()
        )
        config = uvicorn.Config(
            app,
            host=settings.server.host,
            port=settings.server.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=3,
            lifespan="on",
        )
        installation.controller.start()
        installation.lookout.start()
        (installation.state_dir / "server.pid").write_text(f"{os.getpid()}\n")
        address_file = installation.state_dir / "server.url"
        server = Server(config, address_file, app.state.api.stop_streams)
        server.run()
        for name in ("server.url", "server.pid"):
            (installation.state_dir / name).unlink(missing_ok=True)
        return 0 if server.started else 1
    finally:
        # A second signal must not tear the orderly stop.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        installation.close()


def _tell_first_start(installation: Installation, secret: str) -> None:
    for node in installation.engine.world.pool.nodes.values():
        simulated = sum(g.simulated for g in node.gpus)
        real = len(node.gpus) - simulated
        parts = [f"{real} GPUs"] if real or not simulated else []
        parts += [f"{simulated} SIMULATED slots (no GPU behind them)"] if simulated else []
        click.echo(f"Node {node.name}: {', '.join(parts)}", err=True)
    runtime = installation.runtime
    if runtime is not None:
        warning = (
            "" if runtime.confines else ": jobs run UNCONFINED as this user (see `dure doctor`)"
        )
        click.echo(f"Runtime {runtime.name}{warning}", err=True)
    if secret:
        where = installation.state_dir / "admin-token"
        click.echo(f"First administrator's token (kept in {where}):\n  {secret}", err=True)
