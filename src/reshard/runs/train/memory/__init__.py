"""Whether a run of TRL fits into the memory of each GPU, and which change of its options would make it fit.

Everything is an argument: a `TrainingSetup` describes the run, and no GPU is needed to estimate it.
"""
