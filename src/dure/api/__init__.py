"""REST API /v1 and its problem details."""
