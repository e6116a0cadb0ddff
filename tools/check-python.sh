#!/bin/sh
# Say what is missing before pip would say it at length.
set -eu
py=$1
if ! command -v "$py" >/dev/null 2>&1; then
    echo "$py was not found. Install Python 3.11 or newer: apt-get install python3 python3-venv" >&2
    exit 1
fi
if ! "$py" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Dure needs Python 3.11 or newer; $py is $("$py" -V 2>&1)." >&2
    echo "Use another one with: make PYTHON=python3.12 demo" >&2
    exit 1
fi
if ! "$py" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    echo "Python's venv module is missing. Install it: apt-get install python3-venv" >&2
    exit 1
fi
