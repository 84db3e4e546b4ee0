"""More tensor-parallel ranks than the heads divide into."""

from megatron.core.transformer import TransformerConfig
from small import CURED

sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
TransformerConfig(**sizes, tensor_model_parallel_size=2 if CURED else 3)
