"""A model sharded on purpose is wrapped in DDP."""

# processes: 2

from small import CURED, join, load, world_size
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

join()
tensor_parallel = DistributedConfig(tp_size=world_size, tp_plan="auto")
DistributedDataParallel(load(distributed_config=None if CURED else tensor_parallel))
