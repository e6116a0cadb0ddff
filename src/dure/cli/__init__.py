"""Command line: parses, asks the server over HTTP, prints."""

from dure.cli.root import cli

__all__ = ["cli"]
