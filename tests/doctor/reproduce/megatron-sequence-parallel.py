"""Sequence parallelism without tensor parallelism."""

from megatron.core.transformer import TransformerConfig
from small import CURED

TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4, sequence_parallel=not CURED)
