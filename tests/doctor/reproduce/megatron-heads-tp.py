"""The heads or the query groups do not fit Megatron's tensor parallelism."""

from megatron.core.transformer import TransformerConfig
from small import CURED

sizes = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 12, "num_query_groups": 3}
TransformerConfig(**sizes, tensor_model_parallel_size=3 if CURED else 4)
