"""Helpers for programs that run as Dure jobs. Standard library only.

This release reserves the name and fixes the version; `tracking` and `job` follow.
"""

__version__ = "0.1.0"
