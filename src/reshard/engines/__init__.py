"""Frameworks that reshard runs: to verify conversions, and to train."""
