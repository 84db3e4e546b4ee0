"""A checkpoint with the config that describes it: where all questions about its model begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.base.errors import understood
from reshard.families import FAMILIES, Family, declared, live_names
from reshard.families.sized_family import Model
from reshard.formats.checkpoint import Checkpoint
from reshard.model import flat_shapes, memory_names
from reshard.model.find_config import config_of
from reshard.model.model_sizes import mtp_layers, sizes
from reshard.model.recognition import named


@dataclass(frozen=True)
class DescribedCheckpoint:
    """A checkpoint and its config, which is empty if there is none.

    Tensors with the names of a model in memory are under their Hub names; flat ones have their shapes. `family` is the
    declared one that `forced` or else the config names. `folder` is that of the config.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    folder: Path
    family: Family | None
    forced: str | None = None
    was_in_memory: bool = False

    @property
    def file(self) -> Path:
        """The config.json, for messages."""
        return self.folder / "config.json"


def describe(
    checkpoint: Checkpoint, base: Path | None = None, family: str | None = None
) -> DescribedCheckpoint:
    """Find the config of a checkpoint: that of `base`, else the one beside it, else the one that its reader derived.

    `family` overrides the family that the config names. Raises ReshardError.
    """
    config, folder = config_of(checkpoint, base) or {}, base or checkpoint.root
    if checkpoint.flat:
        found = named(family) if family else declared(config.get("model_type"))
        with understood(folder / "config.json"):
            checkpoint = _shaped(checkpoint, config, found, folder)
    return described_by(config, checkpoint, folder, family)


def described_by(
    config: Mapping[str, Any], checkpoint: Checkpoint, folder: Path, family: str | None = None
) -> DescribedCheckpoint:
    """The same with a config that was read before; flat tensors remain flat."""
    found = named(family) if family else declared(config.get("model_type"))
    with understood(folder / "config.json"):
        renamed = memory_names.under_hub_names(checkpoint, live_names(config, family))
    was_in_memory = renamed.tensors.keys() != checkpoint.tensors.keys()
    return DescribedCheckpoint(renamed, config, folder, found, family, was_in_memory)


def _shaped(
    checkpoint: Checkpoint, config: Mapping[str, Any], family: Family | None, folder: Path
) -> Checkpoint:
    """A flat checkpoint with the shapes of its tensors. Raises ReshardError if no declared family provides them."""
    if not config or family is None:
        raise flat_shapes.shapes_needed(checkpoint, config.get("model_type"), list(FAMILIES))
    if family.within:  # no config tells the shapes of tensors that are copied unchanged
        known = [each.name for each in FAMILIES.values() if not each.within]
        raise flat_shapes.shapes_needed(checkpoint, family.name, known)
    there = mtp_layers(checkpoint, list(checkpoint.tensors), config)
    config = {**config, "num_nextn_predict_layers": there}
    args, dims = sizes(family, config, None, checkpoint, folder)
    binding = Model(family, config, args, dims).binding()
    return flat_shapes.shaped(checkpoint, flat_shapes.declared_shapes(binding, family.live))
