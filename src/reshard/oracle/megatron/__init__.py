"""The megatron-core oracle: what its own GPTModel computes from a Megatron checkpoint, on a CPU.

`logits.megatron_logits` loads the checkpoint strictly and runs the forward pass, with one process for each rank, so any
layout runs on one machine. megatron-core 0.12 to 0.19 is supported. Importing these modules imports neither torch nor
megatron-core; calling their functions does.
"""
