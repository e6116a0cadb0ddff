"""The attacks, run as a job: `python -I -S attacks.py TARGETS`. See `table` for the rules."""
# ruff: noqa: PTH120, T201 - few imports

from __future__ import annotations

import json
import os
import sys

if not __package__:  # run as a script: find `dure` without the site module
    sys.path.append(os.path.abspath(__file__).rsplit(os.sep, 5)[0])  # noqa: PTH100 - as above

from dure.adapters.runtime.attack import inward, outward
from dure.adapters.runtime.attack.table import ATTACKS

MODULES = (outward, inward)
"""They fill the table when they are imported."""


def main(targets: str) -> int:
    """Try everything; print one JSON object from name to what came of it."""
    t = json.loads(targets)
    t["out"] = os.environ["JOB_OUTPUT_DIR"]
    t["run_dir"] = os.path.dirname(t["out"])
    results: dict[str, list[object]] = {}
    for name, function in ATTACKS.items():
        try:
            found = function(t)
            results[name] = [bool(found), str(found)[:80] if found else "refused"]
        except (OSError, ValueError, AttributeError) as error:
            results[name] = [False, str(error)[:80]]
    print("ATTACKS " + json.dumps(results), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
