"""What ranks of the Megatron engine import, imported before they are forked."""
# ruff: noqa: F401

import megatron.core.dist_checkpointing.strategies.fully_parallel
import megatron.core.dist_checkpointing.strategies.torch
import pyarrow
import torch.utils.serialization.config

import reshard.engines.megatron.fill_model
import reshard.training.megatron.training_loop
