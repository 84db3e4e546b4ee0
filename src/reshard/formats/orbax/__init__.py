"""Containers of Orbax with MaxText's names: arrays of all layers together (scanned), or an array for each layer."""

from dataclasses import replace

from reshard.base.later_imports import imported_later
from reshard.formats import detection
from reshard.formats.contract import Format

with imported_later(__name__):
    from reshard.formats.orbax.folder import open_checkpoint
    from reshard.formats.orbax.write import SCANNED
    from reshard.formats.orbax.write import UNSCANNED as UNSCANNED_TARGET

FORMAT = Format(
    detection.ORBAX,
    "Orbax checkpoint of MaxText; zarr 2 or 3, in OCDBT or in folders, scanned or not; written scanned, as zarr 2",
    detection.is_orbax,
    open_checkpoint,
    SCANNED,
    aliases=("maxtext",),
    parts=("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "commit_success.txt"),
    seen={"Orbax": r"orbax-checkpoint-tmp|manifest\.ocdbt|/checkpoints/\d+/items\b"},
    judged=("orbax-checkpoint", "MaxText's param_mapping.py"),
)
UNSCANNED = replace(
    FORMAT,
    name=detection.ORBAX_UNSCANNED,
    what="the same with an array for each layer, as MaxText loads it with scan_layers=false",
    detect=lambda path: False,
    target=UNSCANNED_TARGET,
    aliases=("maxtext-unscanned",),
    seen={},
)

__all__ = ["FORMAT", "UNSCANNED"]
