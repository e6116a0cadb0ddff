"""Lets an image without psutil and nvidia-ml-py use those of the bundle, and changes nothing else.

Runs at the start of every Python in the container, also of old ones: plain syntax, under a
millisecond, and whatever fails here is no reason to stop an interpreter. The bundle's packages go
to the end of the path, so what the image has wins.
"""

import sys


def _bundled():
    """Append the packages that fit this Python; returns this file's folder."""
    import os

    boot = os.path.dirname(os.path.abspath(__file__))
    name = "cp%d%d" % sys.version_info[:2]
    deps = os.path.join(os.path.dirname(boot), "deps", name)
    if deps not in sys.path and os.path.isdir(deps):
        sys.path.append(deps)
    return boot


def _shadowed(boot):
    """The image's own sitecustomize, which the import of this one kept from running."""
    import os
    from _frozen_importlib_external import PathFinder

    rest = [p for p in sys.path if os.path.abspath(p) != boot]
    return PathFinder.find_spec("sitecustomize", rest)


def _run(spec):
    module = type(sys)("sitecustomize")
    module.__spec__ = spec
    module.__loader__ = spec.loader
    module.__file__ = spec.origin
    sys.modules["sitecustomize"] = module
    # What it raises is its own and is treated as if this file were not here.
    spec.loader.exec_module(module)


try:
    _spec = _shadowed(_bundled())
except Exception:  # noqa: BLE001 - an interpreter is never stopped by this file
    _spec = None
if _spec is not None:
    _run(_spec)
