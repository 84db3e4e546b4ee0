"""Measurements against `cp` and other tools, in alternating runs, as ratios. Run by `make bench`."""
