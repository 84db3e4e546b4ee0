"""A checkpoint with the tensors that it lacks, from a complete model: MTP layers, towers, a head that was left out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from reshard.algebra.dtypes import DType, of_most_bytes
from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, listed, raise_all
from reshard.base.merged_problems import one_for_all, patterns
from reshard.families.binding import BoundTensor
from reshard.formats import open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.quantization import find
from reshard.model import vocabulary
from reshard.model.dequantization import dequantized
from reshard.model.described_checkpoint import DescribedCheckpoint, describe
from reshard.model.logical_tensors import LogicalTensors, logical_tensors
from reshard.model.model_heads import resolve_if_declared
from reshard.model.resolve import ResolvedCheckpoint


def filled(described: DescribedCheckpoint, folder: Path) -> DescribedCheckpoint:
    """The checkpoint with the tensors of the model in `folder` that it lacks, whose names are in `filled`.

    What an engine fuses is filled as a whole. Raises ReshardError if that model is incomplete or another one, or if it
    is quantized otherwise and its weights cannot be computed.
    """
    checkpoint = described.checkpoint
    complete = open_checkpoint(folder, sources=checkpoint.sources)
    raise_all(complete.problems)
    model = resolve_if_declared(describe(_quantized_alike(complete, checkpoint), folder))
    make = _hub_filling if checkpoint.has_hub_names else _engine_filling
    filling = make(described, model, logical_tensors(model))
    if not filling.names:
        return described
    quantization = checkpoint.quantization
    if quantization:
        quantization, problems = find(filling.tensors, described.config, str(checkpoint.path))
        raise_all(problems)
    completed = replace(
        checkpoint,
        tensors=filling.tensors,
        filled=(*checkpoint.filled, *sorted(filling.names)),
        quantization=quantization,
        notes=[*checkpoint.notes, _note(filling.names, folder)],
    )
    return replace(described, checkpoint=completed)


class _Filling(NamedTuple):
    """All tensors of a checkpoint, and the Hub's names of those that it lacked."""

    tensors: dict[str, Tensor]
    names: set[str]


def _hub_filling(
    described: DescribedCheckpoint, model: ResolvedCheckpoint, logical: LogicalTensors
) -> _Filling:
    own = _with_outer_names(described.checkpoint.tensors, described)
    if model.model is None:
        _refuse_unknown(own, logical, described.checkpoint)
    added = {name: Tensor(each.dtype, logical.view(name)) for name, each in logical.tensors.items()}
    tensors = added | own
    copies = dict(_copies(added.keys() - own.keys(), tensors, model))
    return _Filling(tensors | copies, added.keys() - own.keys() - copies.keys())


def _engine_filling(
    described: DescribedCheckpoint, model: ResolvedCheckpoint, logical: LogicalTensors
) -> _Filling:
    checkpoint = described.checkpoint
    lacking = _lacking_natives(checkpoint, model)
    added = dict(_native_tensors(checkpoint, lacking, logical))
    names = {source for bound in lacking.values() for source in _hub_names(bound, logical)}
    return _Filling(checkpoint.tensors | added, names)


def _quantized_alike(complete: Checkpoint, checkpoint: Checkpoint) -> Checkpoint:
    """The complete model as it is if both are quantized in the same way, else with plain weights."""
    ours, theirs = checkpoint.quantization, complete.quantization
    if ours is None:
        return dequantized(complete, _main_dtype(checkpoint))
    if theirs and ours.arithmetic == theirs.arithmetic:
        return complete
    raise ReshardError(
        "fill-quantization-differs",
        "the checkpoint is quantized, and the model that completes it is not, or not in the same way",
        file=str(complete.path),
        expected=str(ours),
        found=str(theirs) if theirs else "plain weights",
        remedy="make plain weights of both: --dtype bfloat16",
    )


def _main_dtype(checkpoint: Checkpoint) -> DType:
    """The dtype of most bytes."""
    return of_most_bytes((tensor.dtype, tensor.nbytes) for tensor in checkpoint.tensors.values())


def _with_outer_names(tensors: dict[str, Tensor], described: DescribedCheckpoint) -> dict[str, Tensor]:
    """Tensors with the Hub's names; those of a language model on its own get their names in the larger model."""
    family = described.family
    if family is None or family.within is None or described.checkpoint.quantization:
        return tensors
    return {family.hub_name(family.plain_name(name)): tensor for name, tensor in tensors.items()}


def _copies(
    added: Collection[str], tensors: Mapping[str, Tensor], complete: ResolvedCheckpoint
) -> Iterator[tuple[str, Tensor]]:
    """Tensors that the Hub stores again, as MTP layers have an embedding: copies of what was trained."""
    if complete.model is None:
        return
    binding = complete.model.binding(complete.checkpoint.dialect.rules)
    for name in binding.copies.keys() & added:
        native = next(binding.copies[name].sources)
        original = next(binding.native[str(native)].sources)
        yield name, tensors[str(original)]


def _lacking_natives(checkpoint: Checkpoint, complete: ResolvedCheckpoint) -> dict[str, BoundTensor]:
    """The tensors of the complete model that the checkpoint lacks, as its engine has them."""
    model, rows = complete.declared, vocabulary.padded_rows(checkpoint)
    binding = (model.padded(rows) if rows else model).binding(checkpoint.dialect.rules)
    return {name: bound for name, bound in binding.native.items() if name not in checkpoint.tensors}


def _native_tensors(
    checkpoint: Checkpoint, lacking: Mapping[str, BoundTensor], logical: LogicalTensors
) -> Iterator[tuple[str, Tensor]]:
    """An engine's tensors made of those of the complete model; without any, they are zeros."""
    for name, bound in lacking.items():
        source = next(iter(_hub_names(bound, logical)), None)
        dtype = logical.tensors[source].dtype if source else _main_dtype(checkpoint)
        yield name, Tensor(dtype, logical.native_view(name, bound, dtype))


def _hub_names(bound: BoundTensor, logical: LogicalTensors) -> list[str]:
    """The Hub's tensors that an engine's tensor has."""
    return [str(source) for source in bound.sources if source in logical.tensors]


def _refuse_unknown(own: Mapping[str, Tensor], logical: LogicalTensors, checkpoint: Checkpoint) -> None:
    """Raise ReshardError for tensors that the complete model, whose family is not declared, does not have."""
    there = {name: each.shape for name, each in logical.tensors.items()}
    copies = {replica.tensor for replica in logical.replicas}
    problems = [
        Problem(
            "fill-other-model",
            "the model of --fill-from is another one",
            tensor=name,
            file=str(logical.checkpoint.path),
            rule="it has every tensor of the checkpoint, in the same shape",
            expected=str(list(own[name].shape)),
            found=str(list(there[name])) if name in there else "no such tensor",
            remedy="pass the model that training started from",
        )
        for name in own
        if name not in copies and there.get(name) != own[name].shape
    ]
    raise_all(one_for_all(problems, own, str(checkpoint.path)))


def _note(names: Collection[str], folder: Path) -> str:
    counts = [
        f"{name} ({number})" if number > 1 else name for name, number in sorted(patterns(names).items())
    ]
    return f"{len(names):,} tensors are filled from {folder}, as they are there: {listed(counts)}"
