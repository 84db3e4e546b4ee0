"""Checkpoints of DeepSpeed: ZeRO 0 to 3, and the universal format."""

from __future__ import annotations

from reshard.formats.deepspeed.folder import NAME, WHAT, detect, open_checkpoint
from reshard.formats.deepspeed.universal import lay_out

__all__ = ["NAME", "WHAT", "detect", "lay_out", "open_checkpoint"]
