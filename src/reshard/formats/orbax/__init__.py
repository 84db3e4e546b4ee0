"""Containers of Orbax with MaxText's names: arrays of all layers together (scanned), or an array for each layer."""

from __future__ import annotations

from dataclasses import replace

from reshard.formats.contract import Format
from reshard.formats.orbax import folder, write

FORMAT = Format(
    folder.NAME,
    "Orbax checkpoint of MaxText; zarr 2 or 3, in OCDBT or in folders, scanned or not; written scanned, as zarr 2",
    folder.detect,
    folder.open_checkpoint,
    write.target(scanned=True),
    aliases=("maxtext",),
    parts=("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "commit_success.txt"),
    seen={"Orbax": r"orbax-checkpoint-tmp|manifest\.ocdbt|/checkpoints/\d+/items\b"},
    judged=("orbax-checkpoint", "MaxText's param_mapping.py"),
)
UNSCANNED = replace(
    FORMAT,
    name=folder.UNSCANNED,
    what="the same with an array for each layer, as MaxText loads it with scan_layers=false",
    detect=lambda path: False,
    target=write.target(scanned=False),
    aliases=("maxtext-unscanned",),
    seen={},
)

__all__ = ["FORMAT", "UNSCANNED"]
