"""Causes that are computed from a failure: shapes, names, memory, ranks, releases, options."""
