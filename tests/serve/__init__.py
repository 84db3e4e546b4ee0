"""Checkpoints served as models of a Hub."""
