"""`dure admin maintenance`."""

from __future__ import annotations

import click

from dure import wire
from dure.cli.app import App, pass_app
from dure.cli.exits import note
from dure.cli.output import DataCommand, Output, data_options
from dure.cli.texts import say
from dure.core.model import Phase


@click.command("status", cls=DataCommand)
@data_options(wire.MaintenanceOut)
@pass_app
def status_(app: App, out: Output) -> None:
    """Show the phase; needs no login."""
    phase = app.client.phase()
    out.one(wire.MaintenanceOut(phase=phase), [("phase", phase.value)], phase.value)


@click.command("start", cls=DataCommand)
@data_options(wire.MaintenanceOut)
@pass_app
def start_(app: App, out: Output) -> None:
    """Hold the queue (DRAINING): nothing new starts or is accepted, what runs goes on."""
    _set(app, Phase.DRAINING, out)


@click.command("end", cls=DataCommand)
@data_options(wire.MaintenanceOut)
@pass_app
def end_(app: App, out: Output) -> None:
    """Let the queue move again, in the same order."""
    _set(app, Phase.NORMAL, out)


def _set(app: App, phase: Phase, out: Output) -> None:
    now = app.client.set_phase(phase)
    if not out.quiet:
        note(say("phase_is", phase=now.value))
    out.result([wire.MaintenanceOut(phase=now)], single=True)
