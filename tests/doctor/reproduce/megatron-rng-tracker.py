"""Megatron's random state was not set up."""

import torch.distributed as dist
from mcore import enable
from megatron.core import parallel_state, tensor_parallel
from small import CURED

enable()
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
parallel_state.initialize_model_parallel()
if CURED:
    tensor_parallel.model_parallel_cuda_manual_seed(1)
with tensor_parallel.get_cuda_rng_tracker().fork():
    pass
