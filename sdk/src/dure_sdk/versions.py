"""Which packages were really used, and whether the image or Dure's bundle brought them."""

from __future__ import annotations

import sys
from pathlib import Path

from dure_sdk import __version__

PACKAGES = (("mlflow", "mlflow"), ("psutil", "psutil"), ("nvidia-ml-py", "pynvml"))
JUDGED = ("psutil", "pynvml")


def tags() -> dict[str, str]:
    """`dure.sysmetrics.versions`, `.deps` and `.deps_paths`."""
    versions = [f"dure-sdk {__version__}", f"python {sys.version.split()[0]}"]
    for distribution, module in PACKAGES:
        if module in sys.modules:
            versions.append(f"{distribution} {_version(distribution, module)}")
    paths = {name: path for name in JUDGED for path in [_path(name)] if path}
    origins = {"injected" if injected(path) else "image" for path in paths.values()}
    found = {"dure.sysmetrics.versions": ", ".join(versions)}
    if paths:
        found["dure.sysmetrics.deps"] = origins.pop() if len(origins) == 1 else "mixed"
        found["dure.sysmetrics.deps_paths"] = ", ".join(f"{k}: {v}" for k, v in paths.items())
    return found


def injected(path: str) -> bool:
    """Whether a module lies in a bundle: `deps/cpXY` beside `boot/sitecustomize.py`."""
    for folder in Path(path).parents:
        if folder.name == "deps" and (folder.parent / "boot" / "sitecustomize.py").is_file():
            return True
    return False


def _path(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def _version(distribution: str, module: str) -> str:
    """The module's own word first: Ray brings a psutil that no distribution names."""
    own = getattr(sys.modules[module], "__version__", None)
    if isinstance(own, str):
        return own
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
