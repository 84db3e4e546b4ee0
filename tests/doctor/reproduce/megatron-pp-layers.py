"""The layers do not divide into the pipeline stages."""

import torch
from mcore import start
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from small import CURED

start()
config = TransformerConfig(
    num_layers=4 if CURED else 5,
    hidden_size=32,
    num_attention_heads=4,
    pipeline_model_parallel_size=2,
    pipeline_dtype=torch.float32,
)
get_num_layers_to_build(config, vp_stage=None, pp_rank=0)
