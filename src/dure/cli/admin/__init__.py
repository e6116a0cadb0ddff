"""`dure admin`: what administrators change."""
