"""A training command, read without executing anything."""
