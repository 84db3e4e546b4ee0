"""Ranks: which launcher there is, started, followed, ended; why one failed."""
