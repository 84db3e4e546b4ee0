"""Whether a format can store what users ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from reshard.algebra.dtypes import dtype
from reshard.algebra.layout import Layout
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.families.family import MCORE
from reshard.formats import named_by, peft, writable, written
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind, Format, Target
from reshard.formats.options import ConversionOptions
from reshard.planning.conversion_source import ConversionSource, formats_for
from reshard.planning.target_tensors import OutputTypes

IS_ADAPTER = "source-is-an-adapter"
"""The code of the problem that a source is an adapter, but a model is requested."""


def with_format(options: ConversionOptions, target: Path) -> ConversionOptions:
    """The options with the format that the name of the destination has. Raises ReshardError without its ranks."""
    format = writable(options.to).name if options.to else named_by(target)
    if options.dp is None and format is not None and written()[format].ranks.data_parallel:
        raise ReshardError(
            "ranks-not-passed",
            f"the number of ranks that will load the output is missing, and {format} has a file for each of them",
            rule="the files are loaded by as many ranks as they were written for",
            expected="--dp N",
            remedy="pass --dp with the number of ranks (GPUs) of the run that will load the output",
        )
    return replace(options, to=format)


def target_of(source: ConversionSource) -> Target:
    """The target of the format. Raises ReshardError with all options that it does not support."""
    target = written()[source.format.name]
    if source.kind not in target.holds:
        raise _not_held(source.checkpoint, source.kind, source.format)
    raise_all(
        [
            *_ranks(source, target),
            *_kind_of_output(source, target),
            *_dtypes(source, target),
        ]
    )
    return target


def _not_held(checkpoint: Checkpoint, kind: CheckpointKind, format: Format) -> ReshardError:
    if kind is CheckpointKind.MODEL:
        return ReshardError(
            "adapter-not-in-source",
            "the source contains no adapter",
            file=str(checkpoint.path),
            expected="lora_A and lora_B among the tensors",
            remedy="choose another format with --to",
        )
    return ReshardError(
        IS_ADAPTER,
        "the source is an adapter, not a model",
        file=str(checkpoint.path),
        found=f"--to {format.name}",
        remedy=f"merge it into its base (--merge --base DIR), or keep it: --to {' or --to '.join(formats_for(kind))}",
    )


def _chosen(options: ConversionOptions, format: Format) -> str:
    return f"--to {options.to}" if options.to else f"{format.name}, the default"


def _ranks(source: ConversionSource, target: Target) -> Iterator[Problem]:
    """Problems of a layout, and of an engine, that the format does not have."""
    options, format, kind = source.options, source.format, source.kind
    if beyond := _flags(options.layout, target.ranks.axes):
        yield Problem(
            "format-without-layout",
            f"{format.name} {_layout_text(target)}",
            found=beyond,
            remedy="leave out the layout (that of the source is detected), or add --to megatron",
        )
    if not target.ranks.data_parallel and options.layout.dp > 1:
        able = [name for name in formats_for(kind) if written()[name].ranks.data_parallel]
        yield Problem(
            "ranks-not-for-format",
            f"{format.name} is the same for any number of data-parallel ranks",
            found=f"--dp {options.layout.dp}; the format is {_chosen(options, format)}",
            remedy=f"leave out --dp{', or pass --to '.join(['', *able])}",
        )
    given = {
        "--engine": options.engine,
        "--megatron-model": options.megatron_model,
        "--transformer-impl": options.transformer_impl,
    }
    for flag in (flag for flag, value in given.items() if value and MCORE not in target.names.dialects):
        able = [name for name in formats_for(kind) if MCORE in written()[name].names.dialects]
        yield Problem(
            "engine-not-for-format",
            f"{flag} is for Megatron checkpoints; {format.name} is the same for all engines",
            found=f"{flag} {given[flag]}; the format is {_chosen(options, format)}",
            remedy=f"leave out {flag}, or pass --to {' or --to '.join(able)}",
        )


def _flags(layout: Layout, without: tuple[str, ...]) -> str:
    """The flags of a layout, except those of some axes."""
    sizes = layout.as_dict() | {"etp": layout.etp if layout.etp != layout.tp else 1}
    flags = [f"--{axis} {size}" for axis, size in sizes.items() if size != 1 and axis not in without]
    stages = f"--stages {','.join(map(str, layout.stages))}"
    return " ".join([*flags, *([stages] if layout.stages and "pp" not in without else [])])


def _layout_text(target: Target) -> str:
    """What a target has of a layout, in words."""
    axes = ", ".join(f"--{axis}" for axis in target.ranks.axes)
    return f"is divided over ranks by {axes} only" if axes else "has no parallel layout"


def _kind_of_output(source: ConversionSource, target: Target) -> Iterator[Problem]:
    """Problems of an adapter for an engine, and of a state dict."""
    options, format, kind = source.options, source.format, source.kind
    if options.adapter_for and (kind is CheckpointKind.MODEL or format.name != peft.NAME):
        yield Problem(
            "adapter-for-without-adapter",
            "--for is for adapters of PEFT",
            found=f"--for {options.adapter_for}; the output is "
            f"{'a model' if kind is CheckpointKind.MODEL else format.name}",
            remedy="leave out --for, or leave out --merge and pass --to peft for an adapter as the source",
        )
    if options.state_dict and not target.state_dict:
        yield Problem(
            "state-dict-of-another-format",
            f"--state-dict is for --to huggingface, not for {format.name}",
            found=f"--state-dict {options.state_dict} --to {options.to}",
            remedy="leave out one of them",
        )
    if options.state_dict and options.quantize:
        yield Problem(
            "state-dict-quantized",
            "--state-dict and --quantize cannot be combined",
            rule="quantized weights load with the settings in config.json, which a state dict alone does not have",
            remedy="leave out one of them",
        )


def _dtypes(source: ConversionSource, target: Target) -> Iterator[Problem]:
    """Problems of a dtype, or a kind of quantization, that the format does not have."""
    options, format, dtypes = source.options, source.format, target.dtypes
    if dtypes.only and OutputTypes(options.dtype).wanted not in (None, dtype(dtypes.only)):
        yield Problem(
            "format-dtype-fixed",
            f"{format.name} stores weights in {dtypes.only} only",
            rule="the engine casts them to the dtype that its own config names",
            found=f"--dtype {options.dtype}",
            remedy="leave out --dtype",
        )
    if options.quantize and dtypes.quantizes and options.quantize not in dtypes.quantizes:
        yield Problem(
            "quantize-value-of-another-format",
            f"{format.name} has no weights of this kind",
            expected=f"--quantize {dtypes.listed}",
            found=f"--quantize {options.quantize}; the format is {_chosen(options, format)}",
            remedy="choose one of these, or another format: "
            + " or ".join(f"--to {each}" for each in _quantizing(options.quantize)),
        )
    if options.quantize and not dtypes.quantizes:
        yield Problem(
            "quantized-output-unsupported",
            "this format cannot store quantized weights",
            found=f"--quantize {options.quantize}; the format is {_chosen(options, format)}",
            remedy=f"pass --to {' or --to '.join(_quantizing(options.quantize))}, or leave out --quantize",
        )


def _quantizing(how: str) -> list[str]:
    """The formats that have weights of a kind."""
    return [name for name, target in written().items() if how in target.dtypes.quantizes]
