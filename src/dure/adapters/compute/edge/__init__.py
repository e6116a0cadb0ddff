"""Edge nodes over the lease queue: PCs that come and go."""
