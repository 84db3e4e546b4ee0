"""A piece of an optimizer's state is described as older megatron-core did: by a range of the flat tensor."""

import dataclasses

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from small import CURED

whole = ShardedTensor.from_rank_offsets("exp_avg", torch.zeros(4))
piece = whole if CURED else dataclasses.replace(whole, flattened_range=slice(0, 2), data=torch.zeros(2))
piece.validate_metadata_integrity()
