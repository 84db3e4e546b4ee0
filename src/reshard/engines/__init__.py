"""Frameworks that reshard runs: to judge what was converted, and to train."""
