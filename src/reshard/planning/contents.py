"""What an output contains: a request with all tensors under the names of its format, and what became of the source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from reshard.algebra.tensors import Replica
from reshard.base.later_imports import imported_later
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind, Request, main_dtype
from reshard.formats.optimizer import MASTER_STATE
from reshard.formats.quantization import UNTOLD, settings_of
from reshard.model.logical_tensors import LogicalTensors, logical_tensors
from reshard.model.vocabulary import lost_padding
from reshard.planning.prepared_source import PreparedSource
from reshard.planning.target_tensors import OutputTypes, elements, names_of, recast
from reshard.transfer.memory_budget import NO_NEED, MemoryNeed

with imported_later(__name__):
    from reshard.model.quantizer import quantized
    from reshard.planning import adapter_tensors, optimizer_tensors, served_adapter


@dataclass(frozen=True)
class Contents:
    """A request with its tensors, and what users should know of how the source became them.

    `dropped` counts the bytes of the source that are not among them, by rule; `left_out` are the rules for tensors that
    have no place in the output. `replicas` are stored more than once. `memory` is what computing the tensors takes.
    """

    request: Request
    parameters: int
    dropped: Counter[str]
    replicas: list[Replica]
    notes: Sequence[str]
    memory: MemoryNeed
    left_out: frozenset[str] = frozenset()


def contents_of(source: PreparedSource) -> Contents:
    """The contents of the output. Raises ReshardError for tensors that the format cannot store."""
    request = source.request()
    if source.kind is CheckpointKind.ADAPTER:
        return _of_adapter(source, request)
    return _of_model(source, request)


def _of_adapter(source: PreparedSource, request: Request) -> Contents:
    checkpoint = source.resolved.checkpoint
    named = served_adapter.served if source.options.adapter_for else adapter_tensors.named
    request, left, notes = named(checkpoint, request)
    dropped = +(Counter(checkpoint.dropped) + Counter(left))
    return Contents(request, elements(request.tensors), dropped, checkpoint.replicas, notes, NO_NEED)


def _of_model(source: PreparedSource, request: Request) -> Contents:
    """The weights of a model, and its optimizer states if requested."""
    options, target = source.options, source.target
    checkpoint = _with_masters(source)
    logical, request, padding = _with_shared_rows(source, checkpoint, request)
    names = names_of(source.format.name, request, logical, target.names)
    left = names.dropped(logical)
    dropped = checkpoint.dropped + padding + left

    types = OutputTypes(_wanted_dtype(source), logical.tensors.values(), widened=checkpoint.dialect.widened)
    of_tensors = target.dtypes.of_tensors
    tensors = names.tensors(logical, types, of_tensors(request, types.main) if of_tensors else None)
    contents = Contents(
        replace(request, tensors=tensors),
        checkpoint.parameters if checkpoint.quantization else elements(tensors),
        dropped,
        _replicas(logical, dropped, options.with_optimizer),
        [*_notes(source, logical, types)],
        MemoryNeed.of(checkpoint.tensors),
        frozenset(left),
    )
    if options.quantize and target.dtypes.keeps_scales:
        contents = _quantized_contents(contents)
    if options.with_optimizer:
        all_states = optimizer_tensors.logical_states(logical)
        kept = {state: each for state, each in all_states.items() if state in target.states}
        contents = replace(
            contents,
            request=replace(contents.request, states=names.states(kept)),
            dropped=contents.dropped - optimizer_tensors.carried(checkpoint, target.states),
        )
    return contents


def _wanted_dtype(source: PreparedSource) -> str | None:
    """The dtype of the output's weights, if it is not that of the source's."""
    return source.target.dtypes.only or source.options.dtype


def _with_masters(source: PreparedSource) -> Checkpoint:
    """The checkpoint, with its masters as weights where the output is to be in their dtype."""
    checkpoint, only = source.resolved.checkpoint, source.target.dtypes.only
    if source.options.with_optimizer or (only and not checkpoint.optimizer.is_ordered):
        return optimizer_tensors.with_masters(checkpoint, _wanted_dtype(source))
    return checkpoint


def _with_shared_rows(
    source: PreparedSource, checkpoint: Checkpoint, request: Request
) -> tuple[LogicalTensors, Request, Counter[str]]:
    """The logical tensors, the request for them, and the dropped padding.

    Padding rows took part in the softmax during training: those that source and output both have are converted.
    """
    model, sized = source.resolved.model, request.model
    lost: Counter[str] = Counter()
    if model and sized:
        rows = min(sized.dims.padded_vocab, model.dims.padded_vocab)
        model, sized = model.with_vocabulary(rows), sized.with_vocabulary(rows)
        fewer = model.dims.padded_vocab - sized.dims.padded_vocab
        lost = lost_padding(checkpoint, model, fewer, with_states=source.options.with_optimizer)
    resolved = replace(source.resolved, checkpoint=checkpoint, model=model)
    return logical_tensors(resolved), replace(request, model=sized), lost


def _replicas(logical: LogicalTensors, dropped: Counter[str], with_optimizer: bool) -> list[Replica]:
    """What is stored more than once, and what proves which states belong to which weights, if they are used."""
    uses_states = with_optimizer or optimizer_tensors.REPLACED in dropped
    return [*logical.replicas, *(logical.checkpoint.optimizer.proof() if uses_states else ())]


def _notes(source: PreparedSource, logical: LogicalTensors, types: OutputTypes) -> Iterator[str]:
    """What users should know of states and dtypes."""
    options, target, checkpoint = source.options, source.target, logical.checkpoint
    states = checkpoint.optimizer.states
    if options.with_optimizer and MASTER_STATE in states and MASTER_STATE not in target.states:
        yield "the fp32 masters are optimizer states too; --dtype float32 makes them the weights"
    if checkpoint.quantization and not (
        checkpoint.quantization.settings or settings_of(source.resolved.config)
    ):
        yield UNTOLD
    if target.dtypes.only and not options.dtype:
        yield from recast(source.format.name, logical, types)


def _quantized_contents(contents: Contents) -> Contents:
    """The contents with weights that are quantized as users ask."""
    request = contents.request
    config = {**request.config, "dtype": main_dtype(request.tensors)}
    tensors, settings, notes, memory = quantized(request.tensors, str(request.options.quantize), config)
    return replace(
        contents,
        request=replace(request, tensors=tensors, config=config, quantization=settings),
        notes=[*contents.notes, *notes],
        memory=contents.memory.plus(memory),
    )
