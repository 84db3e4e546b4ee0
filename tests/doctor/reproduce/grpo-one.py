"""GRPO with one generation per prompt."""

import trl
from small import CURED

generations = 2 if CURED else 1
trl.GRPOConfig("out", per_device_train_batch_size=2, num_generations=generations, use_cpu=True, bf16=False)
