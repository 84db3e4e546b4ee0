"""The names of each engine and tool for the tensors of a model: one dialect, with its rules, in each module."""
