"""LoRA adapters: found among the tensors of any checkpoint, merged into a base, or converted as adapters."""

from __future__ import annotations

from reshard.adapters import megatron, peft_names
from reshard.adapters.adapter import Adapter, Pair, find
from reshard.adapters.merge import merged, quantized_base
from reshard.adapters.settings import find_settings
from reshard.formats import peft
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.target import Kind

__all__ = ["Adapter", "Pair", "find", "find_settings", "kind_of", "merged", "quantized_base"]


def kind_of(checkpoint: Checkpoint) -> Kind:
    """What a checkpoint contains: with low-rank pairs among its tensors, it is an adapter."""
    if megatron.holds_pairs(checkpoint):
        return Kind.FUSED_ADAPTER
    pairs = checkpoint.has_hub_names and peft_names.holds_pairs(checkpoint.tensors)
    return Kind.ADAPTER if pairs or checkpoint.format == peft.NAME else Kind.MODEL
