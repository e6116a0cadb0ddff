"""Dure: one queue, one fair policy, one honest account for shared GPUs."""

__version__ = "0.1.0"
