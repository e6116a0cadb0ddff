"""How a job's process is confined."""
