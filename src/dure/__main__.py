"""Runs `dure` as `python -m dure`."""

from dure.wiring import main

if __name__ == "__main__":
    main()
