"""The modeling file uses the old gradient-checkpointing method."""

# needs: transformers>=4.50.3,<4.54

from small import CURED
from transformers import Qwen2ForCausalLM


class QWenLMHeadModel(Qwen2ForCausalLM):
    if not CURED:

        def _set_gradient_checkpointing(self, module, value=False):
            pass


QWenLMHeadModel.from_pretrained("models/qwen2-v4").gradient_checkpointing_enable()
