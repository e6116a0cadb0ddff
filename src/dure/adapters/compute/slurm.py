"""Slurm cluster backend (a later release)."""
