"""An exporter copies plain weights into a model that became tensor-parallel by itself."""

# processes: 2
# needs: transformers>=4.50.3,<4.54

import torch
from small import CURED
from transformers import AutoModelForCausalLM

device_map = None if CURED else "auto"
path = "models/qwen3-v4"
model = AutoModelForCausalLM.from_pretrained(path, device_map=device_map, torch_dtype=torch.float32)
gathered_from_megatron = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 64)}
for name, tensor in gathered_from_megatron.items():
    model.get_parameter(name).data.copy_(tensor)
