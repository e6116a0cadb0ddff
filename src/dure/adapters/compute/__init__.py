"""Backends that start, stop and observe jobs; none knows another."""
