"""What is converted, and to which format: the first stage of planning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from reshard.adapters import checkpoint_kind
from reshard.base.errors import ReshardError, raise_all
from reshard.base.later_imports import imported_later
from reshard.base.options import options_of
from reshard.folders.base_hints import BASE
from reshard.formats import huggingface, peft, writable, written
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind, Format
from reshard.formats.options import ConversionOptions

with imported_later(__name__):
    from reshard.planning import merged_source


@dataclass(frozen=True)
class ConversionSource:
    """A checkpoint, or one with its adapter merged, and what becomes of it.

    `options` are those that are left: a base whose weights were merged is not among them, a hinted base is.
    """

    checkpoint: Checkpoint
    kind: CheckpointKind
    format: Format
    options: ConversionOptions


def conversion_source(path: Path, checkpoint: Checkpoint, options: ConversionOptions) -> ConversionSource:
    """The source of a conversion.

    Raises ReshardError for a checkpoint with problems, for an adapter that does not fit its base, and if there is
    nothing to do.
    """
    raise_all(checkpoint.problems)
    kind = CheckpointKind.MODEL if options.state_dict else checkpoint_kind(checkpoint)
    if kind is CheckpointKind.FUSED_ADAPTER:
        checkpoint, kind = merged_source.hub_adapter(checkpoint, options), CheckpointKind.ADAPTER
    if options.merge:
        if kind is CheckpointKind.MODEL:
            raise ReshardError(
                "merge-without-adapter",
                "no adapter to merge",
                file=str(checkpoint.path),
                expected="lora_A and lora_B among the tensors",
                remedy="leave out --merge, or pass an adapter as the source",
            )
        checkpoint, options = merged_source.merged_source(checkpoint, options)
        kind = CheckpointKind.MODEL
    format = _format(path, checkpoint, kind, options)
    return _with_hinted_base(ConversionSource(checkpoint, kind, format, options))


def formats_for(kind: CheckpointKind) -> list[str]:
    """The names of the formats that can store a kind of checkpoint."""
    return [name for name, target in written().items() if kind in target.holds]


def _format(path: Path, checkpoint: Checkpoint, kind: CheckpointKind, options: ConversionOptions) -> Format:
    """The requested format. By default, an adapter stays an adapter, and a model becomes a Hugging Face folder."""
    if options.to:
        return writable(options.to)
    if kind is CheckpointKind.ADAPTER:
        return peft.FORMAT
    if checkpoint.format == huggingface.NAME and path.is_dir() and not _changes_anything(options):
        raise ReshardError(
            "source-already-hugging-face",
            "the source is already a Hugging Face folder",
            file=str(path),
            remedy="choose another format, for example --to megatron, or add what should change: --dtype, "
            "--quantize or --max-shard-size",
        )
    return huggingface.FORMAT


def _changes_anything(options: ConversionOptions) -> bool:
    """Whether the options ask for another output than a copy of the source; how it is read changes nothing."""
    plain = {each.name: each.default for each in options_of(ConversionOptions) if each.about.only_reads}
    return replace(options, **plain, beside={}).meant != ConversionOptions().meant


def _with_hinted_base(source: ConversionSource) -> ConversionSource:
    """If config or tokenizer is missing, use the base that another tool recorded, if it exists.

    `resolve` then checks that its config belongs to these weights.
    """
    checkpoint, options = source.checkpoint, source.options
    if options.state_dict:
        return source
    own = checkpoint.companions()
    if options.base_path or (own.config and (own.has_tokenizer or options.no_tokenizer)):
        return source
    notes = list(checkpoint.notes)
    base = None
    for hint in checkpoint.hints():
        if hint.kind == BASE:
            notes.append(str(hint))
            if hint.exists and (Path(hint.value) / "config.json").is_file():
                base = Path(hint.value)
                break
    noted = replace(source, checkpoint=replace(checkpoint, notes=notes))
    return replace(noted, options=replace(options, base=base)) if base else noted
