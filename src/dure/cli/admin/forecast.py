"""`dure admin forecast`."""

from __future__ import annotations

import click

from dure import wire
from dure.cli.app import App, pass_app
from dure.cli.output import DataCommand, Output, data_options


@click.command("score", cls=DataCommand)
@data_options(wire.CalibrationOut)
@pass_app
def score_(app: App, out: Output) -> None:
    """Show how often starts fell inside their P20-P80 band; 60 % is honest."""
    score = app.client.calibration()
    share = "" if score.inside_share is None else f"{score.inside_share:.0%}"
    pairs = [
        ("scored", str(score.scored)),
        ("inside", f"{score.inside} {share}".strip()),
        ("early", str(score.early)),
        ("late", str(score.late)),
    ]
    out.one(score, pairs, share)
