"""Where jobs, attempts, charges and events are kept."""
