"""LoRA adapters: found among the tensors of any checkpoint, merged into a base, or carried over as they are."""

from __future__ import annotations

from reshard.adapters.adapter import Adapter, Pair, find, is_adapter
from reshard.adapters.merge import merged
from reshard.adapters.settings import find_settings

__all__ = ["Adapter", "Pair", "find", "find_settings", "is_adapter", "merged"]
