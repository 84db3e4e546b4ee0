"""A checkpoint with the config that describes it: where all questions about its model begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.base.errors import UNUSABLE, Problem, ReshardError, raise_all, reading_values
from reshard.families import FAMILIES, Family, declared, live_names, named_by
from reshard.families.config_map import ConfigMap
from reshard.families.disagreements import foreign
from reshard.families.mechanisms import REARRANGED
from reshard.families.recorded_configs import OF_ANY_FAMILY, WHERE, agreed_configs
from reshard.families.rope import yarn_of
from reshard.families.sized_family import Model
from reshard.formats.checkpoint import Checkpoint
from reshard.model import flat_shapes, memory_names
from reshard.model.find_config import config_beside, config_of, contradictions
from reshard.model.model_sizes import disagreements, mtp_layers, sizes
from reshard.model.recognition import fit_of, named


@dataclass(frozen=True)
class DescribedCheckpoint:
    """A checkpoint and its config, which is empty if there is none.

    Tensors with the names of a model in memory are under their Hub names; flat ones have their shapes. `family` is the
    declared one that was chosen, or else the config names. `folder` is that of the config. `warnings` are about other
    values that the checkpoint records.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    folder: Path
    family: Family | None
    was_in_memory: bool = False
    warnings: tuple[Problem, ...] = ()

    @property
    def file(self) -> Path:
        """The config.json, for messages."""
        return self.folder / "config.json"


def describe(
    checkpoint: Checkpoint, base: Path | None = None, family: str | None = None, trust: str = "checkpoint"
) -> DescribedCheckpoint:
    """Find the config of a checkpoint: that of `base`, else the one beside it, else the one that its reader derived.

    `family` overrides the family that the config names. Where the checkpoint records another config, `trust` ("config"
    or "checkpoint") decides. Raises ReshardError, also if the weights fit only one of the two.
    """
    config, folder = config_of(checkpoint, base) or {}, base or checkpoint.description.folder
    if not checkpoint.native.has_shapes:
        declared_family = named(family) if family else named_by(config)
        with reading_values(folder / "config.json"):
            checkpoint = _shaped_checkpoint(checkpoint, config, declared_family, folder)
    described = described_by(config, checkpoint, folder, family)
    with reading_values(described.file):
        for recorded in _records(described, base):
            described = _with_agreed_config(described, recorded, trust)
    return described


def _records(described: DescribedCheckpoint, base: Path | None) -> Iterator[Mapping[str, Any]]:
    """What a checkpoint records of its own config: for its reader, and in a config.json that a base replaces."""
    checkpoint = described.checkpoint
    yield checkpoint.description.stated
    if rope := yarn_of(checkpoint.description.args):
        yield {"rope_parameters": rope}
    replaced = config_beside(checkpoint) if base else None
    if replaced and _fits(described, replaced):
        yield replaced


def _with_agreed_config(
    described: DescribedCheckpoint, recorded: Mapping[str, Any], trust: str
) -> DescribedCheckpoint:
    """The same with a config that agrees with a recorded one. Raises ReshardError if they describe different models."""
    table = described.family.config if described.family else OF_ANY_FAMILY
    text, own = table.text(described.config), table.text(recorded)
    if not (own and text) or contradictions(described.config) or not _is_complete(table, text):
        return described
    raise_all(replace(each, file=str(described.file)) for each in _of_another_family(described, own, trust))
    agreed, warnings = agreed_configs(table, text, own, trust, str(described.file))
    config = table.whole(described.config, agreed)
    return replace(described, config=config, warnings=(*described.warnings, *warnings))


def _is_complete(table: ConfigMap, config: Mapping[str, Any]) -> bool:
    """Whether a config has what its family needs: what is wrong with it is said where it is used."""
    try:
        table.to_config(table.to_args(config))
    except UNUSABLE:
        return False
    return True


def _of_another_family(
    described: DescribedCheckpoint, recorded: Mapping[str, Any], trust: str
) -> Iterator[Problem]:
    """What a recorded model of another family computes, and that of the config does not."""
    family, own = described.family, declared(recorded.get("model_type"))
    if family is None or own is None or own is family or family.within:
        return
    text = family.config.text(described.config)
    args = own.config.to_args({**text, **recorded})
    for name, problem in foreign(family.config, text, args, WHERE):
        if trust != "config" or name in REARRANGED:
            yield replace(problem, remedy="pass the config that belongs to this checkpoint: --base DIR")


def _fits(described: DescribedCheckpoint, recorded: Mapping[str, Any]) -> bool:
    """Whether the tensors do not show that a config beside them is wrong, for which a base is the remedy."""
    family, checkpoint = described.family, described.checkpoint
    if family is None:
        return True
    try:
        _, dims = sizes(family, recorded, None, checkpoint, checkpoint.description.folder)
        own, base = (fit_of(family, each, checkpoint) for each in (recorded, described.config))
        misfits = own.differing - base.differing if own and base else own is None
        return not misfits and not disagreements(checkpoint, family, dims)
    except (*UNUSABLE, ReshardError):
        return False


def described_by(
    config: Mapping[str, Any], checkpoint: Checkpoint, folder: Path, family: str | None = None
) -> DescribedCheckpoint:
    """The same with a config that was read before; flat tensors remain flat."""
    declared_family = named(family) if family else named_by(config)
    with reading_values(folder / "config.json"):
        renamed = memory_names.under_hub_names(checkpoint, live_names(config, family))
    was_in_memory = renamed.tensors.keys() != checkpoint.tensors.keys()
    return DescribedCheckpoint(renamed, config, folder, declared_family, was_in_memory)


def _shaped_checkpoint(
    checkpoint: Checkpoint, config: Mapping[str, Any], family: Family | None, folder: Path
) -> Checkpoint:
    """A flat checkpoint with the shapes of its tensors. Raises ReshardError if no declared family provides them."""
    if not config or family is None:
        raise flat_shapes.shapes_needed(checkpoint, config.get("model_type"), list(FAMILIES))
    if family.within:  # no config tells the shapes of tensors that are copied unchanged
        known = [each.name for each in FAMILIES.values() if not each.within]
        raise flat_shapes.shapes_needed(checkpoint, family.name, known)
    mtp_count = mtp_layers(checkpoint, list(checkpoint.tensors), config)
    config = {**config, "num_nextn_predict_layers": mtp_count}
    args, dims = sizes(family, config, None, checkpoint, folder)
    binding = Model(family, config, args, dims).binding()
    return flat_shapes.shaped(checkpoint, flat_shapes.declared_shapes(binding, family.live))
