"""A batch size that is not micro batch times accumulation times processes."""

# needs: deepspeed

from deepspeed.runtime.config import DeepSpeedConfig
from small import CURED

sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 18}
DeepSpeedConfig({"train_batch_size": 36 if CURED else 256, **sizes})
