"""Starts the ranks of a run, follows them until they end, and says why one failed."""
