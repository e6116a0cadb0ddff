"""The daemon of an edge node: one process, outbound connections only."""
