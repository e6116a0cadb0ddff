"""The only place that names concrete classes."""


def main() -> None:
    """Run the command line."""
