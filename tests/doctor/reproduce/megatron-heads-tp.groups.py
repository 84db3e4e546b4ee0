"""The key-value groups are not divisible by the tensor-parallel ranks."""

from megatron.core.transformer import TransformerConfig
from small import CURED

sizes = {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 12, "num_query_groups": 3}
TransformerConfig(**sizes, tensor_model_parallel_size=3 if CURED else 4)
