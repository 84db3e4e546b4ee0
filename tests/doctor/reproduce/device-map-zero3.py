"""device_map given together with DeepSpeed ZeRO-3."""

# needs: deepspeed
# environment: DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0

import deepspeed
from small import CURED, load
from transformers.integrations import HfDeepSpeedConfig

deepspeed.init_distributed("gloo")
zero3 = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
load(device_map=None if CURED else "auto")
