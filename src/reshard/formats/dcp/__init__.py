"""torch.distributed.checkpoint: a folder of `.metadata` and `*.distcp`. Megatron's torch_dist shares its files."""

from __future__ import annotations

from reshard.formats.dcp.folder import NAME, WHAT, Alias, detect, lay_out, open_checkpoint

__all__ = ["NAME", "WHAT", "Alias", "detect", "lay_out", "open_checkpoint"]
