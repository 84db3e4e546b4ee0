"""Checkpoints of Megatron-Core: `torch_dist.py` and `legacy.py` are two formats with the same names and shards."""
