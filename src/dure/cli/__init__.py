"""Command line: parses, asks the server over HTTP, prints."""
