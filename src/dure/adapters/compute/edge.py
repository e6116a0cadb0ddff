"""Edge nodes over Redis leases (a later release)."""
