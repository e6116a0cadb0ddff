"""`dure usage`: what labs used, in hours of an RTX 4090 and in TFLOP-s."""

from __future__ import annotations

from decimal import Decimal

import click

from dure import wire
from dure.cli.app import App, pass_app
from dure.cli.exits import note
from dure.cli.output import Column, DataCommand, Output, data_options, when
from dure.cli.texts import say
from dure.core.model import CHARGED, LedgerKind

TFLOP_S_PER_HOUR = 297_360
"""An hour of an RTX 4090: 82.6 TFLOPS × 3600 s."""


def hours(tflop_s: str) -> str:
    """TFLOP-s as hours of an RTX 4090."""
    return f"{float(tflop_s) / TFLOP_S_PER_HOUR:,.2f}"


def plain(tflop_s: str) -> str:
    """TFLOP-s to the unit, with separators."""
    return f"{float(tflop_s):,.0f}"


@click.command(cls=DataCommand)
@click.option("--lab", metavar="LAB", help="one lab: how much it ran and how much it reserved")
@click.option("--ledger", is_flag=True, help="with --lab: the lines of the account")
@data_options()
@pass_app
def usage(app: App, lab: str | None, ledger: bool, out: Output) -> None:
    """Show labs by use, the least used first: the order in which they are served."""
    if ledger and lab is None:
        raise click.UsageError("--ledger needs --lab")
    if lab is None:
        out.of(wire.LabOut)
        out.rows(app.client.labs(), _LABS, lambda item: item.name)
        return
    out.of(wire.LedgerLine if ledger else wire.UsageOut)
    seen = app.client.usage(lab, limit=None if ledger or out.json else 1)
    if ledger:
        out.rows(seen.lines, _LEDGER, lambda item: item.job)
        if not (out.json or out.quiet):
            _reconcile(seen)
        return
    parts = [
        ("usage", seen.usage_tflop_s),
        ("charged", seen.charged_tflop_s),
        ("run_use", seen.run_tflop_s),
        ("reserved_use", seen.reserved_tflop_s),
        ("opening", seen.opening_tflop_s),
    ]
    pairs = [("lab", seen.lab), ("as_of", when(seen.as_of_ms))]
    pairs += [(key, f"{hours(value)} 4090-h = {plain(value)} TFLOP-s") for key, value in parts]
    out.one(seen, pairs, seen.lab)


def _reconcile(seen: wire.UsageOut) -> None:
    """Add up the charged lines beside what the account says."""
    lines = sum(Decimal(x.cost_tflop_s) for x in seen.lines if LedgerKind(x.kind) in CHARGED)
    agree = lines == Decimal(seen.charged_tflop_s)
    verdict = say("reconciles" if agree else "differs")
    note(say("ledger_sum", lines=f"{lines:,}", charged=seen.charged_tflop_s, verdict=verdict))


_LABS = [
    Column("lab", lambda item: item.name),
    Column("title", lambda item: item.title, flex=True),
    Column("hours", lambda item: hours(item.usage_tflop_s), right=True),
    Column("tflop_s", lambda item: plain(item.usage_tflop_s), right=True),
    Column("weight", lambda item: f"{item.weight:g}", right=True),
    Column("members", lambda item: str(item.members), right=True),
]
_LEDGER = [
    Column("job", lambda line: str(line.job), right=True),
    Column("epoch", lambda line: str(line.epoch), right=True),
    Column("kind", lambda line: line.kind),
    Column("user", lambda line: line.user),
    Column("node", lambda line: line.node),
    Column("tier", lambda line: line.tier),
    Column("gpus", lambda line: str(line.gpus), right=True),
    Column("from", lambda line: when(line.from_ms)),
    Column("to", lambda line: when(line.to_ms)),
    Column("hours", lambda line: hours(line.cost_tflop_s), right=True),
    Column("tflop_s", lambda line: line.cost_tflop_s, right=True),
]
