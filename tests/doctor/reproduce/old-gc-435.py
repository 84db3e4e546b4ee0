"""transformers 4.35 calls the old gradient-checkpointing method with new arguments."""

# needs: transformers>=4.35,<4.35.3

from small import CURED
from transformers import LlamaConfig, LlamaForCausalLM


class QWenPreTrained(LlamaForCausalLM):
    if not CURED:

        def _set_gradient_checkpointing(self, module, value=False):
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = value


sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
QWenPreTrained(LlamaConfig(vocab_size=64, **sizes)).gradient_checkpointing_enable()
