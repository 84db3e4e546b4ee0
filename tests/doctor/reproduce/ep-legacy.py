"""A tensor-parallel plan was asked for that the model does not have."""

# processes: 2

from small import CURED, load
from transformers.distributed import DistributedConfig

wanted = {"distributed_config": DistributedConfig(tp_size=2, ep_size=2)} if CURED else {"tp_plan": {}}
load("models/qwen3moe", **wanted)
