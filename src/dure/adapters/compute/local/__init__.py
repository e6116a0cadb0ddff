"""This machine: finds its GPUs and runs one supervisor per job."""
