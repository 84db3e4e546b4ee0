"""Tensor parallelism on a CPU or with gloo through the Trainer."""

# processes: 2

from small import CURED, arguments, dataset, load
from transformers import Trainer
from transformers.distributed import DistributedConfig

config = DistributedConfig(fsdp_size=2) if CURED else DistributedConfig(tp_size=2, tp_plan="auto")
Trainer(model=load(distributed_config=config), args=arguments(), train_dataset=dataset()).train()
