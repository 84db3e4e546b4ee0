"""Making and checking the final folder of a run."""
