"""FSDP1 flattens frozen and trainable parameters together."""

# processes: 2

import torch
from small import CURED, join, load, with_lora
from torch.distributed.fsdp import FullyShardedDataParallel

join()
FullyShardedDataParallel(with_lora(load()), use_orig_params=CURED, device_id=torch.device("cpu"))
