"""The vocabulary is not divisible by the tensor-parallel ranks."""

# processes: 2

import torch
from mcore import QWEN2, config, start
from megatron.core.tensor_parallel import VocabParallelEmbedding
from small import CURED

start(tp=2)
VocabParallelEmbedding(252 if CURED else 251, 32, init_method=torch.nn.init.ones_, config=config(QWEN2, tp=2))
