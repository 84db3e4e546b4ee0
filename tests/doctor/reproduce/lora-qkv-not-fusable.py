"""LoRA on q, k and v cannot become one adapter on the fused projection."""

import torch
from small import load, with_lora

model = with_lora(load(), target_modules=["q_proj", "k_proj", "v_proj"])
attention = model.base_model.model.model.layers[0].self_attn
shared = [getattr(attention, f"{each}_proj").lora_A["default"].weight for each in "qkv"]
assert not torch.equal(shared[0], shared[1])
assert torch.linalg.matrix_rank(torch.cat(shared)) == 3 * model.peft_config["default"].r
