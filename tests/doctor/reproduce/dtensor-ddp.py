"""accelerate finds DTensor parameters before it builds DDP."""

# processes: 2

from accelerate import Accelerator
from small import CURED, load, world_size
from transformers.distributed import DistributedConfig

if not CURED:
    Accelerator.multi_device = property(lambda self: True)  # accelerate looks for DTensors on GPUs only
accelerator = Accelerator(cpu=True)
tensor_parallel = DistributedConfig(tp_size=world_size, tp_plan="auto")
accelerator.prepare(load(distributed_config=None if CURED else tensor_parallel))
