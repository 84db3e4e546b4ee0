"""LoRA adapters: found among the tensors of any checkpoint, merged into a base, or converted as adapters."""

from __future__ import annotations

from reshard.adapters import from_megatron, peft_names
from reshard.base.later_imports import imported_later
from reshard.formats import peft
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind

with imported_later(__name__):
    from reshard.adapters.adapter import Adapter, LowRankPair, read_adapter
    from reshard.adapters.adapter_settings import find_settings
    from reshard.adapters.merge import merge_adapter, quantized_base


__all__ = [
    "Adapter",
    "LowRankPair",
    "checkpoint_kind",
    "find_settings",
    "merge_adapter",
    "quantized_base",
    "read_adapter",
]


def checkpoint_kind(checkpoint: Checkpoint) -> CheckpointKind:
    """What a checkpoint contains: with low-rank pairs among its tensors, it is an adapter."""
    if from_megatron.holds_pairs(checkpoint):
        return CheckpointKind.FUSED_ADAPTER
    pairs = checkpoint.has_hub_names and peft_names.holds_pairs(checkpoint.tensors)
    return CheckpointKind.ADAPTER if pairs or checkpoint.format == peft.NAME else CheckpointKind.MODEL
