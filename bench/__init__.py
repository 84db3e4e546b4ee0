"""Measurements beside `cp` and beside other tools, in alternation, as ratios. Run by `make bench`."""
