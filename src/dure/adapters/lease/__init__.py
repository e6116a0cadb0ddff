"""The lease queue of edge nodes: over Redis, and in this process for tests and trials."""
