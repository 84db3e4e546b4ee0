"""One conversion on many machines: parts of a plan, handed out to workers through Dask, Ray, Slurm or MPI."""
