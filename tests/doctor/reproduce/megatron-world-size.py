"""The number of GPUs does not fit the parallel sizes."""

import torch.distributed as dist
from megatron.core import parallel_state
from small import CURED

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
parallel_state.initialize_model_parallel(tensor_model_parallel_size=1 if CURED else 2)
