"""`python -m dure.adapters.runtime.attack MODE [HOST PORT]`: one run, in a process of its own."""

from __future__ import annotations

import sys

from dure.adapters.runtime.attack.run import main

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
