"""The source of a conversion, prepared for its target: its model is known, and every dtype can be stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from reshard.base.errors import Problem, ReshardError, listed
from reshard.base.later_imports import imported_later
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind, Format, Request, Target
from reshard.formats.options import ConversionOptions
from reshard.formats.quantization import refusal
from reshard.model.described_checkpoint import DescribedCheckpoint, describe
from reshard.model.find_config import contradictions
from reshard.model.model_heads import as_named, refuse_other_head, resolve_if_declared
from reshard.model.resolve import ResolvedCheckpoint, resolve
from reshard.planning.conversion_source import ConversionSource
from reshard.planning.target_options import target_of
from reshard.planning.target_tensors import OutputTypes

with imported_later(__name__):
    from reshard.model.dequantization import dequantized
    from reshard.model.filled_checkpoint import filled
    from reshard.planning import adapter_tensors, optimizer_tensors


@dataclass(frozen=True)
class PreparedSource:
    """A source with its model: dequantized, if the target cannot store scales."""

    resolved: ResolvedCheckpoint
    kind: CheckpointKind
    format: Format
    target: Target
    options: ConversionOptions

    def request(self) -> Request:
        """What is asked of the format, with the engine's sizes and without tensors. Raises ReshardError if refused."""
        checkpoint, model, target = self.resolved.checkpoint, self.resolved.model, self.target
        first, dialects = target.names.dialects[0], target.names.dialects
        request = Request(
            self.options,
            first if target.names.are_derived or not model else model.dialect(dialects),
            self.options.layout,
            model.padded(model.dims.vocab) if model else None,
            self.resolved.config,
            checkpoint,
        )
        return target.fit(request) if target.fit else request


def prepared_source(source: ConversionSource) -> PreparedSource:
    """The source with its model. Raises ReshardError for options and models that the format does not support."""
    target, options = target_of(source), source.options
    checkpoint = _storable(source, target)
    if options.with_optimizer:
        optimizer_tensors.refuse_unable(checkpoint, source.format)
    if source.kind is CheckpointKind.ADAPTER:
        resolved = adapter_tensors.resolved(checkpoint, target, options)
    else:
        resolved = _resolve_model(checkpoint, target, options)
        if options.with_optimizer and resolved.checkpoint.filled:
            raise ReshardError(
                Problem(
                    "filled-tensors-without-states",
                    "tensors that are filled from another model have no optimizer states",
                    tensor=listed(resolved.checkpoint.filled, 3),
                    file=str(resolved.checkpoint.path),
                    rule="an optimizer has a state for each weight that it trains",
                    remedy="leave out --with-optimizer to convert the weights alone",
                )
            )
        if options.with_optimizer and _has_repeats(resolved, target):
            raise ReshardError(
                Problem(
                    "repeated-weights-have-several-states",
                    "the engine repeats weights of this family, with optimizer states of their own",
                    file=str(resolved.checkpoint.path),
                    rule="a weight has one state",
                    remedy="convert the weights alone, without optimizer states",
                )
            )
    return PreparedSource(resolved, source.kind, source.format, target, options)


def _told_if_complete(checkpoint: Checkpoint, complete: Path) -> Checkpoint:
    """The checkpoint, with a note if there was nothing to fill."""
    if checkpoint.filled:
        return checkpoint
    note = f"the checkpoint has every tensor of {complete}: nothing is filled"
    return replace(checkpoint, notes=[*checkpoint.notes, note])


def _has_repeats(resolved: ResolvedCheckpoint, target: Target) -> bool:
    """Whether an engine on either side stores elements in several places, of which the other side has one."""
    checkpoint, model = resolved.checkpoint, resolved.model
    is_engines = not checkpoint.has_hub_names or not target.names.are_derived
    return bool(model and is_engines and model.binding(checkpoint.dialect.rules).repeats)


def _storable(source: ConversionSource, target: Target) -> Checkpoint:
    """The checkpoint, dequantized if its target cannot keep the scales, or if other dtypes are requested."""
    checkpoint, options = source.checkpoint, source.options
    if not checkpoint.quantization or not (
        options.dtype or options.quantize or not target.dtypes.keeps_scales
    ):
        return checkpoint
    flags = {"--dtype": options.dtype, "--quantize": options.quantize, "--to": source.format.name}
    why = next(f"{flag} {value}" for flag, value in flags.items() if value)
    computes_from_float32 = options.quantize and target.dtypes.of_tensors
    wanted = OutputTypes("float32" if computes_from_float32 else options.dtype).wanted
    return dequantized(checkpoint, wanted, partial(refusal, wanted=why))


def _resolve_model(checkpoint: Checkpoint, target: Target, options: ConversionOptions) -> ResolvedCheckpoint:
    """The model of a checkpoint. If names are not converted, its family need not be declared."""
    if options.state_dict and checkpoint.has_hub_names and checkpoint.native.has_shapes:
        return as_named(DescribedCheckpoint(checkpoint, {}, checkpoint.description.folder, None))
    described = describe(checkpoint, options.base_path, options.family, options.trust)
    if options.fill_path:
        described = filled(described, options.fill_path)
        checkpoint = _told_if_complete(described.checkpoint, options.fill_path)
        described = replace(described, checkpoint=checkpoint)
    if not target.names.are_derived:
        refuse_other_head(described)
        if described.config and target.check_config:
            target.check_config(described.config)
        resolved = resolve(described, options.trust, computes=target.judges_model)
        if target.check_config:
            target.check_config(resolved.config)
        return resolved
    if options.family:
        return resolve(described, options.trust, computes=not checkpoint.has_hub_names)
    wrong = contradictions(described.config) if checkpoint.has_hub_names else []
    notes = [f"config.json contradicts itself: {text}" for text in wrong]
    noted = replace(described.checkpoint, notes=[*checkpoint.notes, *notes])
    return resolve_if_declared(replace(described, checkpoint=noted), options.trust)
