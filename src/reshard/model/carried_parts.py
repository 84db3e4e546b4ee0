"""The parts of a model outside its language model, such as vision towers, which are copied unchanged.

A tensor of theirs is copied only under the name and in the shape that the Hugging Face folder has, if its weights are
there: what an engine calls otherwise would be initialized at random by whoever loads the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError
from reshard.base.merged_problems import one_for_all
from reshard.families import Family, live_names
from reshard.families.binding import Binding
from reshard.families.outer_model import OuterModel
from reshard.formats import huggingface
from reshard.formats.checkpoint import Checkpoint
from reshard.model import memory_names

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class CarriedParts:
    """The parts of a checkpoint of `family` that are copied unchanged, and those of the Hugging Face `folder`."""

    checkpoint: Checkpoint
    family: Family
    config: Mapping[str, Any]
    folder: Path

    def completed(self) -> tuple[CarriedParts, list[str]]:
        """The same with these parts as today's engine spells them, and notes.

        Parts that the engine does not save are added from the folder.
        """
        checkpoint, within = self.checkpoint, self.family.within
        if within is None:
            return self, []
        respelled = self if checkpoint.has_hub_names else self._with_todays_names(within)
        absent = respelled._not_saved(within)
        if not absent:
            return respelled, []
        named = ", ".join(f"{hub}*" for hub in absent)
        those = self._of_folder.tensors if self._of_folder else {}
        added = {name: each for name, each in those.items() if name.startswith(tuple(absent))}
        if not added:
            return respelled, [
                f"the checkpoint has no {named}, nor has {self.folder}: "
                "pass the model that it was trained from (--base)"
            ]
        if not checkpoint.has_hub_names:
            added = _native_tensors(within, added, checkpoint.dialect.rules, self.config)
        tensors = {**respelled.checkpoint.tensors, **added}
        note = f"{named} are copied from {self.folder}: the engine keeps none"
        return replace(respelled, checkpoint=replace(respelled.checkpoint, tensors=tensors)), [note]

    def shapes(self) -> Shapes:
        """The Hub shapes of their tensors, by hub name."""
        within, checkpoint = self.family.within, self.checkpoint
        if within is None:
            return {}
        if not checkpoint.has_hub_names:
            return {name: each.shape for name, each in self._hub_tensors(within, checkpoint.tensors).items()}
        return _hub_shapes(within, checkpoint)

    def problems(self, carried: Shapes) -> list[Problem]:
        """A problem for each required part that has no tensors, and for each tensor that the folder has otherwise."""
        within = self.family.within
        absent = within.missing_parts(carried) if within else ()
        missing = _not_kept if self.checkpoint.native.is_part else _missing_problem
        return [
            *(missing(self.checkpoint, self.family, prefix) for prefix in absent),
            *self._unlike_the_folders(carried),
        ]

    def _not_saved(self, within: OuterModel) -> list[str]:
        """The prefixes of parts that engines may leave out, and this one did."""
        if not (self.checkpoint.has_megatron_names or self.checkpoint.native.is_part):
            return []
        shapes = self.shapes()
        kinds = (True, False) if self.checkpoint.native.is_part else (True,)
        return [hub for optional in kinds for hub in within.missing_parts(shapes, optional=optional)]

    def _with_todays_names(self, within: OuterModel) -> CarriedParts:
        """The same with the tensors of parts that other releases of the engine spell otherwise under today's names."""
        checkpoint = self.checkpoint
        change = partial(self._todays, within)
        tensors = change(checkpoint.tensors)
        if tensors.keys() == checkpoint.tensors.keys():
            return self
        optimizer = checkpoint.optimizer.changed(change)
        return replace(self, checkpoint=replace(checkpoint, tensors=tensors, optimizer=optimizer))

    def _todays(self, within: OuterModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hub = self._hub_tensors(within, tensors)
        kept = {name: each for name, each in tensors.items() if within.part(name, native=True) is None}
        return {**kept, **_native_tensors(within, hub, self.checkpoint.dialect.rules, self.config)}

    def _hub_tensors(self, within: OuterModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        on_hub = {}
        for name, tensor in tensors.items():
            part = within.part(name, native=True)
            for hub, view in (
                part.on_hub(name, tensor.view, self.checkpoint.dialect.rules, self.config) if part else ()
            ):
                on_hub[hub] = Tensor(tensor.dtype, view)
        return on_hub

    @cached_property
    def _of_folder(self) -> Checkpoint | None:
        """The Hugging Face folder's weights under the Hub's names; None if there are none that can be read."""
        with suppress(ReshardError):
            if huggingface.detect(self.folder):
                checkpoint = huggingface.open_checkpoint(self.folder, self.checkpoint.sources)
                return memory_names.under_hub_names(checkpoint, live_names(self.config, self.family.name))
        return None

    def _unlike_the_folders(self, carried: Shapes) -> list[Problem]:
        """A problem for each tensor that only the folder or only the checkpoint has, and for each other shape."""
        within = self.family.within
        if within is None or self.folder == self.checkpoint.path or not carried or not self._of_folder:
            return []
        theirs = _hub_shapes(within, self._of_folder)
        prefixes = tuple(part.hub for part in within.carried if any(map(part.has, carried)))
        theirs = {name: shape for name, shape in theirs.items() if name.startswith(prefixes)}
        names = sorted(carried.keys() | theirs.keys())
        problems = [
            _unlike_problem(name, carried.get(name), theirs.get(name), self.folder)
            for name in names
            if carried.get(name) != theirs.get(name)
        ]
        return one_for_all(problems, names, str(self.checkpoint.path))


def _hub_shapes(within: OuterModel, checkpoint: Checkpoint) -> Shapes:
    """The shapes of what a checkpoint with the Hub's names has of the parts."""
    quantization = checkpoint.quantization
    weights = quantization.whole(checkpoint.tensors) if quantization else checkpoint.tensors
    names = [name for name in weights if within.part(name, native=False)]
    return {name: checkpoint.shape(name) or weights[name].shape for name in names}


def _native_tensors(
    within: OuterModel, hub: Mapping[str, Tensor], engine: str, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The Hub's tensors of the parts as an engine has them."""
    binding = Binding(within.copies({name: each.shape for name, each in hub.items()}, engine, config))
    return {
        name: Tensor(
            hub[str(next(bound.sources))].dtype, bound.view.through(lambda name: hub[str(name)].view)
        )
        for name, bound in binding.native.items()
    }


def _missing_problem(checkpoint: Checkpoint, family: Family, prefix: str) -> Problem:
    return Problem(
        "model-part-missing",
        "a part of the model is missing",
        file=str(checkpoint.path),
        rule=f"a model of family {family.name} has several parts, and all are converted",
        expected=f"tensors whose Hub names begin with {prefix}",
        found="none",
        remedy="copy or save the checkpoint again with all its parts, or take them from the model that training "
        "started from: --fill-from DIR",
        values={"family": family.name},
    )


def _not_kept(checkpoint: Checkpoint, family: Family, prefix: str) -> Problem:
    return Problem(
        "model-part-not-kept",
        "the checkpoint has only the language model of a larger model",
        file=str(checkpoint.path),
        rule=f"a model of family {family.name} has several parts, and what wrote the checkpoint keeps one of them",
        expected=f"tensors whose Hub names begin with {prefix}",
        found="none",
        remedy="pass the Hugging Face folder that it was made from, whose other parts are copied: --base DIR",
        values={"family": family.name},
    )


def _unlike_problem(
    name: str, shape: tuple[int, ...] | None, theirs: tuple[int, ...] | None, folder: Path
) -> Problem:
    return Problem(
        "part-tensor-unlike-base",
        "a tensor outside the language model differs from the base",
        tensor=name,
        rule="such a tensor is copied under the name and in the shape that it has in the base, which loaders look for",
        expected=f"{list(theirs)}" if theirs else f"no such tensor, as in {folder}",
        found=f"{list(shape)}" if shape else "no such tensor",
        remedy="pass the folder that training started from (--base DIR); if this is it, the engine names or packs "
        "its tensors otherwise: export the checkpoint with the engine's own tool",
    )
