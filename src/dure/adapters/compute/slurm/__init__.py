"""Jobs on a Slurm cluster: one batch job an attempt, under the supervisor of the local backend."""
