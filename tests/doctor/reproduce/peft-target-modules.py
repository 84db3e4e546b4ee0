"""LoRA's target modules do not exist in this model."""

from small import CURED, load, with_lora

with_lora(load(), target_modules="all-linear" if CURED else ["c_attn", "w1"])
