"""Python client of the HTTP API, on the standard library alone."""
