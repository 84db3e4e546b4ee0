"""One conversion on many machines: workers, started by Slurm, take parts of a plan until none is left."""
