"""`dure sdk`: the part of Dure that lives in other people's training images."""

from __future__ import annotations

from pathlib import Path

import click

from dure.core.errors import DureError, ErrorCode
from dure.wiring.local_commands import refusals_in_words


@click.group()
def sdk() -> None:
    """Bring the tracking SDK into training images."""


@sdk.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--python", "pythons", multiple=True, help="only this version, e.g. 3.11; repeatable")
@click.option("--mlflow", is_flag=True, help="with mlflow-skinny")
def bundle(folder: Path, pythons: tuple[str, ...], *, mlflow: bool) -> None:
    """Build FOLDER with dure-sdk, psutil and nvidia-ml-py for each Python.

    Mount it read-only and set PYTHONPATH to its `boot`; what the image has of its own wins.
    """
    with refusals_in_words():
        try:
            from dure_sdk import bundle as made  # noqa: PLC0415 - the server runs without the SDK
        except ImportError as error:
            value = "is not installed"
            raise DureError(ErrorCode.BAD_SETTING, key="dure-sdk", value=value) from error
        try:
            done = made.build(folder, pythons or made.PYTHONS, mlflow=mlflow)
        except (made.BundleError, OSError) as error:
            raise DureError(ErrorCode.BAD_SETTING, key=str(folder), value=str(error)) from error
    click.echo(f"{done.folder}: Python {', '.join(done.pythons)}")
    for version, why in done.left_out.items():
        click.echo(f"  Python {version} is left out: {why}", err=True)
    click.echo(f"PYTHONPATH={done.folder / 'boot'}")
