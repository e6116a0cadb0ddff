"""Use cases over ports: commands, queries, and the loop that dispatches."""
