"""The heads or the query groups do not fit Megatron's tensor parallelism."""

from megatron.core.transformer import TransformerConfig
from small import CURED

sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
TransformerConfig(**sizes, tensor_model_parallel_size=2 if CURED else 3)
