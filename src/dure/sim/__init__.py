"""Virtual clock and fake cluster that drive the production planner."""
