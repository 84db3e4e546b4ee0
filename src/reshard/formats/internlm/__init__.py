"""Checkpoints of InternEvo, a file for each rank."""

from __future__ import annotations

from reshard.formats.internlm.folder import NAME, WHAT, detect, open_checkpoint
from reshard.formats.internlm.write import lay_out

__all__ = ["NAME", "WHAT", "detect", "lay_out", "open_checkpoint"]
