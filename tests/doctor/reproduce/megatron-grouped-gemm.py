"""Grouped experts without the grouped_gemm package."""

import torch.distributed as dist
from mcore import QWEN3_MOE, config
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import GroupedMLP

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
parallel_state.initialize_model_parallel()
grouped = config(QWEN3_MOE)
grouped.moe_grouped_gemm = True
GroupedMLP(2, grouped, ProcessGroupCollection.use_mpu_process_groups())
