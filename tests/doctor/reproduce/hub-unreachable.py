"""A model of the hub that is not in the cache, without a network."""

from small import CURED, MODEL
from transformers import AutoConfig

AutoConfig.from_pretrained(MODEL if CURED else "Qwen/Qwen3-0.6B")
