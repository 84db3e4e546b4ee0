"""Training data: every record is checked before a run, and wrong ones are named by file and line."""
