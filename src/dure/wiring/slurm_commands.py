"""`dure slurm check` and `dure slurm config`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
import msgspec

from dure.adapters.compute.slurm.check import advice, findings, look
from dure.wiring.local_commands import config_option, read
from dure.wiring.slurm import commands, mapped

MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}


@click.group()
def slurm() -> None:
    """Look at a Slurm cluster before and while Dure uses it. Changes nothing."""


@config_option
@slurm.command()
@click.option("--json", "as_json", is_flag=True, help="machine-readable")
def check(config: Path | None, as_json: bool) -> None:
    """Tell what works and what is missing, a line each; exit 1 if something must change."""
    settings = read(config).slurm
    cluster = look(commands(settings))
    found = findings(
        cluster,
        mapped(settings),
        run_root=settings.run_root,
        python=settings.python,
        as_user=settings.as_user,
        is_root=os.geteuid() == 0,
    )
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(finding) for finding in found]))
    else:
        for finding in found:
            click.echo(f"{MARKS[finding.status]} {finding.name:<12} {finding.detail}")
    sys.exit(1 if any(finding.status == "fail" for finding in found) else 0)


@config_option
@slurm.command("config")
def config_lines(config: Path | None) -> None:
    """Print lines for slurm.conf: partitions, preemption, a scheduler that starts at once."""
    settings = read(config).slurm
    cluster = look(commands(settings))
    if cluster.problem:
        click.echo(f"Slurm does not answer: {cluster.problem}", err=True)
        sys.exit(1)
    click.echo(advice(cluster, mapped(settings)), nl=False)
