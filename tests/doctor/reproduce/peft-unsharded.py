"""A LoRA tensor was saved without gathering its shards."""

import torch
from small import CURED, load, with_lora

model = with_lora(load())
for name, tensor in model.named_parameters():
    if "lora_" in name and not CURED:
        tensor.data = torch.empty(0)  # what ZeRO-3 leaves of it outside of its gathering
model.save_pretrained("out")
