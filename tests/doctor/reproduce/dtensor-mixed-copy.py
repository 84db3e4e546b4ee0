"""An exporter copies plain weights into a model that became tensor-parallel by itself."""

# processes: 2
# needs: transformers>=4.50.3,<4.54

import torch
from small import CURED
from transformers import AutoModelForCausalLM


def export_to_hf(path, weights):
    """As exporters do: a model of the config, then the gathered weights into it."""
    device_map = None if CURED else "auto"
    model = AutoModelForCausalLM.from_pretrained(path, device_map=device_map, torch_dtype=torch.float32)
    for name, tensor in weights.items():
        model.get_parameter(name).data.copy_(tensor)


export_to_hf("models/qwen3-v4", {"model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 64)})
