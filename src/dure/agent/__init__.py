"""What runs on a node: the supervisor of one job and the code that starts it."""
