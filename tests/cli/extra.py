"""A command that `wiring` could add."""

import click


@click.command()
def extra() -> None:
    """Say so."""
    click.echo("extra ran")
