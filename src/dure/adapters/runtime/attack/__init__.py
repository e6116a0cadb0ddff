"""Attacks that a job might try, run for real against the jails of this machine."""
