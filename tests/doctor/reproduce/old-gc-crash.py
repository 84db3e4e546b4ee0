"""Gradient checkpointing was switched on but never installed."""

import torch
from small import CURED, MODEL, arguments, dataset
from transformers import Qwen3ForCausalLM, Trainer


class QWenLMHeadModel(Qwen3ForCausalLM):
    if not CURED:

        def _set_gradient_checkpointing(self, module, value=False):
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = value


model = QWenLMHeadModel.from_pretrained(MODEL, dtype=torch.float32)
Trainer(model=model, args=arguments(gradient_checkpointing=True), train_dataset=dataset()).train()
