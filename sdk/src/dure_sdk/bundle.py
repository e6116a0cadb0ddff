"""Builds the folder that brings psutil and nvidia-ml-py into images that lack them.

    bundle/boot/sitecustomize.py     mounted read-only, PYTHONPATH=bundle/boot
    bundle/deps/cp39 … cp314         dure-sdk, psutil, nvidia-ml-py (mlflow-skinny if asked for)

No artifact client is among them: artifacts go through the tracking server.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import dure_sdk

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
PACKAGES = ("psutil>=6", "nvidia-ml-py>=12")
MLFLOW = "mlflow-skinny>=3"
STRAYS = ("example.py", "bin", "__pycache__")
"""nvidia-ml-py drops an `example.py` at the top, where any program's own import could find it."""
PIP_LIMIT_S = 600


class BundleError(Exception):
    """The bundle could not be built; the text says for which Python and why."""


class Bundle(NamedTuple):
    """A built bundle: its folder, and what could not be made for a Python."""

    folder: Path
    pythons: list[str]
    left_out: dict[str, str]


def build(
    target: os.PathLike[str] | str,
    pythons: Sequence[str] = PYTHONS,
    *,
    mlflow: bool = False,
    pip_options: Sequence[str] = (),
) -> Bundle:
    """Make the bundle at `target`, replacing an older one when the new one is whole.

    `pip_options` are handed to pip (an index of your own, `--no-index --find-links FOLDER`).
    MLflow needs Python 3.10; for an older one it is left out, and the result says so.
    """
    folder = Path(target).absolute()
    if not _is_ours(folder):
        raise BundleError(
            f"{folder} holds other files: name a new or empty folder, or an older bundle"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".bundle-", dir=str(folder.parent)))
    try:
        left_out = _fill(work, pythons, mlflow=mlflow, pip_options=pip_options)
        work.chmod(0o755)
        _swap(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Bundle(folder, list(pythons), left_out)


def _is_ours(folder: Path) -> bool:
    """Whether the folder may be replaced: it is not there, empty, or a bundle and nothing else."""
    if not folder.exists():
        return True
    return folder.is_dir() and {entry.name for entry in folder.iterdir()} <= {"boot", "deps"}


def _fill(
    work: Path, pythons: Sequence[str], *, mlflow: bool, pip_options: Sequence[str]
) -> dict[str, str]:
    left_out: dict[str, str] = {}
    package = Path(dure_sdk.__file__).parent
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package / "boot", work / "boot", ignore=skip)
    for python in pythons:
        deps = work / "deps" / f"cp{python.replace('.', '')}"
        _install(PACKAGES, python, deps, pip_options)
        if mlflow:
            try:
                _install((MLFLOW,), python, deps, pip_options)
            except BundleError as error:
                left_out[python] = str(error)
        shutil.copytree(package, deps / "dure_sdk", ignore=skip)
        for name in STRAYS:
            stray = deps / name
            shutil.rmtree(stray) if stray.is_dir() else stray.unlink(missing_ok=True)
    return left_out


def _install(packages: Sequence[str], python: str, deps: Path, options: Sequence[str]) -> None:
    machine = platform.machine()
    tags = [f"--platform=manylinux{name}_{machine}" for name in ("2014", "_2_17", "_2_28")]
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--only-binary=:all:", "--no-compile", "--implementation=cp"),
        *(f"--python-version={python}", f"--target={deps}", *tags),
        *options,
        *packages,
    ]
    try:
        done = subprocess.run(  # noqa: S603 - this Python's own pip
            command, capture_output=True, text=True, timeout=PIP_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BundleError(f"pip did not end within {PIP_LIMIT_S} s for Python {python}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1] if lines else done.stderr.strip()[-300:]
        raise BundleError(f"{', '.join(packages)} for Python {python}: {why}")


def _swap(work: Path, folder: Path) -> None:
    """The old bundle goes only when the new one is whole; jobs that have it mounted keep it."""
    old = Path(tempfile.mkdtemp(prefix=".bundle-old-", dir=str(folder.parent)))
    if folder.exists():
        folder.rename(old / "bundle")
    work.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
