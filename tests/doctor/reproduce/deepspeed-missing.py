"""A DeepSpeed config is given but DeepSpeed is not installed."""

from small import CURED, arguments

arguments(deepspeed=None if CURED else {"zero_optimization": {"stage": 2}})
