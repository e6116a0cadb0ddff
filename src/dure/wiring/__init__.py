"""The only place that names concrete classes: builds a server, adds the local commands."""

from __future__ import annotations


def main() -> None:
    """Run the command line; what does not talk HTTP is imported only when it is called."""
    from dure.cli import cli  # noqa: PLC0415 - start-up time of every command

    cli()
