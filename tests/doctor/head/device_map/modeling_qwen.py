"""The model's own code, as it came with the weights: Qwen2 under the interface of transformers 4.34."""

from transformers import Qwen2ForCausalLM


class QWenLMHeadModel(Qwen2ForCausalLM):
    supports_gradient_checkpointing = True

    def _set_gradient_checkpointing(self, module, value=False):
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = value
