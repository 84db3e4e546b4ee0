"""A keyword argument that newer TRL or transformers have removed."""

from small import CURED
from transformers import TrainingArguments

TrainingArguments("out", use_cpu=True, **{"eval_strategy" if CURED else "evaluation_strategy": "no"})
