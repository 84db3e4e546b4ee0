"""The GRPO batch is not a whole number of groups."""

import trl
from small import CURED

batch = 4 if CURED else 3
trl.GRPOConfig("out", per_device_train_batch_size=batch, num_generations=2, use_cpu=True, bf16=False)
