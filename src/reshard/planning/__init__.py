"""Plan a conversion: the output's tensors, each made of the source's logical tensors, and its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import NamedTuple

from reshard.adapters import kind_of
from reshard.algebra.dtypes import dtype
from reshard.algebra.layout import Layout
from reshard.algebra.tensors import Replica
from reshard.base.errors import Problem, ReshardError, along_with
from reshard.base.options import options_of
from reshard.base.plain_json import to_json
from reshard.families.family import MCORE
from reshard.folders import companions
from reshard.folders.base_hints import BASE, find_hints
from reshard.formats import huggingface, open_checkpoint, peft, writable, written
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import MASTER_STATE, CheckpointKind, Format, Request, Target, main_dtype
from reshard.formats.options import ConversionOptions
from reshard.formats.quantization import UNTOLD, refusal, settings_of
from reshard.model.dequantization import dequantized
from reshard.model.described_checkpoint import DescribedCheckpoint, describe
from reshard.model.find_config import contradictions
from reshard.model.logical_tensors import logical_tensors
from reshard.model.model_heads import as_named, refuse_other_head, resolve_if_declared
from reshard.model.quantizer import quantized
from reshard.model.resolve import ResolvedCheckpoint, resolve
from reshard.model.vocabulary import lost_padding
from reshard.planning import (
    adapter_tensors,
    averaged_source,
    merged_source,
    optimizer_tensors,
    output_companions,
    served_adapter,
)
from reshard.planning.hub_tensors import HubTensors
from reshard.planning.target_tensors import OutputTypes, elements, names_of, recast
from reshard.transfer.memory_budget import NO_NEED, MemoryMeter, MemoryNeed, uncollected
from reshard.transfer.plan import OutputFile, Plan
from reshard.transfer.source_files import OnStep, Sources

__all__ = ["IS_ADAPTER", "HubTensors", "plan_conversion", "planned_tensors"]

IS_ADAPTER = "source-is-an-adapter"
"""The code of the problem that a source is an adapter, but a model is requested."""


@uncollected()
def plan_conversion(
    source: Path,
    options: ConversionOptions,
    on_step: OnStep = lambda step: None,
    meter: MemoryMeter | None = None,
) -> Plan:
    """Plan the conversion of `source`. Raises ReshardError. `on_step` receives a description of each step.

    Reads headers and metadata only, and the lora_A of projections that may share one, within the limit of `meter`.
    """
    others = options.average.paths[:-1] if options.average else ()
    sources = Sources(source, *others, *([options.base_path] if options.base_path else []), meter=meter)
    with sources.counted(on_step):
        checkpoint = open_checkpoint(source, options.iteration, options.strip, sources)
    on_step("planning")
    return _planned(source, checkpoint, options)


@uncollected()
def planned_tensors(checkpoint: Checkpoint, options: ConversionOptions) -> HubTensors:
    """The tensors that a conversion to a Hugging Face folder (for an adapter, to PEFT's) would write.

    No files are planned, and no tokenizer is needed. Raises ReshardError.
    """
    is_model = options.merge or kind_of(checkpoint) is CheckpointKind.MODEL
    to = huggingface.NAME if is_model else peft.NAME
    merged = _merged(checkpoint.path, checkpoint, replace(options, to=to, no_tokenizer=True))
    prepared = _prepared(*merged)
    content = _content(*prepared)
    return HubTensors(prepared.source, content.request, content.replicas, content.need, content.dropped)


def _planned(source: Path, checkpoint: Checkpoint, options: ConversionOptions) -> Plan:
    checkpoint, kind, format, options = _merged(source, checkpoint, options)
    with along_with(output_companions.lacking(checkpoint, kind, options)):
        return _plan(*_prepared(checkpoint, kind, format, options))


def _merged(
    source: Path, checkpoint: Checkpoint, options: ConversionOptions
) -> tuple[Checkpoint, CheckpointKind, Format, ConversionOptions]:
    """The source, averaged or with its adapter merged, and its base; its kind, its output format, the other options."""
    if options.average:
        checkpoint = averaged_source.averaged_source(checkpoint, options, planned_tensors)
    if checkpoint.problems:
        raise ReshardError(checkpoint.problems)
    kind = CheckpointKind.MODEL if options.state_dict else kind_of(checkpoint)
    if kind is CheckpointKind.FUSED_ADAPTER:
        checkpoint, kind = merged_source.hub_adapter(checkpoint, options), CheckpointKind.ADAPTER
    if options.merge:
        _refuse_nothing_to_merge(checkpoint, kind)
        checkpoint, options = merged_source.merged_source(checkpoint, options)
        kind = CheckpointKind.MODEL
    format = _format(source, checkpoint, kind, options)
    checkpoint, options = _with_hinted_base(checkpoint, options)
    return checkpoint, kind, format, options


class _PreparedSource(NamedTuple):
    """A source prepared for its target, with its model: dequantized if the target cannot store scales."""

    source: ResolvedCheckpoint
    kind: CheckpointKind
    format: Format
    target: Target
    options: ConversionOptions


def _prepared(
    checkpoint: Checkpoint, kind: CheckpointKind, format: Format, options: ConversionOptions
) -> _PreparedSource:
    target = _target(format, checkpoint, kind, options)
    if checkpoint.quantization and (options.dtype or options.quantize or not target.quantized):
        flags = {"--dtype": options.dtype, "--quantize": options.quantize, "--to": format.name}
        why = next(f"{flag} {value}" for flag, value in flags.items() if value)
        wanted = OutputTypes("float32" if options.quantize and target.typed else options.dtype).wanted
        checkpoint = dequantized(checkpoint, wanted, partial(refusal, wanted=why))
    if options.with_optimizer:
        optimizer_tensors.refuse_unable(checkpoint, format)
    if kind is CheckpointKind.ADAPTER:
        resolved = adapter_tensors.resolved(checkpoint, target, options)
    else:
        resolved = _resolved(checkpoint, target, options)
    return _PreparedSource(resolved, kind, format, target, options)


def _refuse_nothing_to_merge(checkpoint: Checkpoint, kind: CheckpointKind) -> None:
    if kind is CheckpointKind.MODEL:
        raise ReshardError(
            "merge-without-adapter",
            "no adapter to merge",
            file=str(checkpoint.path),
            expected="lora_A and lora_B among the tensors",
            remedy="leave out --merge, or pass an adapter as the source",
        )


def _format(source: Path, checkpoint: Checkpoint, kind: CheckpointKind, options: ConversionOptions) -> Format:
    """The requested format. By default, an adapter stays an adapter, and a model becomes a Hugging Face folder."""
    if options.to:
        return writable(options.to)
    if kind is CheckpointKind.ADAPTER:
        return peft.FORMAT
    if checkpoint.format == huggingface.NAME and source.is_dir() and not _changes_anything(options):
        raise ReshardError(
            "source-already-hugging-face",
            "the source is already a Hugging Face folder",
            file=str(source),
            remedy="add what should change (--dtype, --quantize, --max-shard-size), "
            f"or choose another format: --to {', --to '.join(_able(kind))}",
        )
    return huggingface.FORMAT


def _changes_anything(options: ConversionOptions) -> bool:
    """Whether the options ask for another output than a copy of the source; how it is read changes nothing."""
    plain = {each.name: each.default for each in options_of(ConversionOptions) if each.about.only_reads}
    return replace(options, **plain, beside={}).meant != ConversionOptions().meant


def _target(
    format: Format, checkpoint: Checkpoint, kind: CheckpointKind, options: ConversionOptions
) -> Target:
    """The target of the format. Raises ReshardError with all options that it does not support."""
    target = written()[format.name]
    if kind not in target.holds:
        raise _not_held(checkpoint, kind, format)
    if problems := [*_unfit(format, target, kind, options)]:
        raise ReshardError(problems)
    return target


def _flags(layout: Layout, without: tuple[str, ...]) -> str:
    """The flags of a layout, except those of some axes."""
    sizes = layout.as_dict() | {"etp": layout.etp if layout.etp != layout.tp else 1}
    words = [f"--{axis} {size}" for axis, size in sizes.items() if size != 1 and axis not in without]
    stages = f"--stages {','.join(map(str, layout.stages))}"
    return " ".join([*words, *([stages] if layout.stages and "pp" not in without else [])])


def _divided(target: Target) -> str:
    """What a target has of a layout, in words."""
    axes = ", ".join(f"--{axis}" for axis in target.layout)
    return f"is divided over ranks by {axes} only" if axes else "has no parallel layout"


def _unfit(
    format: Format, target: Target, kind: CheckpointKind, options: ConversionOptions
) -> Iterator[Problem]:
    chosen = f"--to {options.to}" if options.to else f"{format.name}, the default"
    if beyond := _flags(options.layout, target.layout):
        yield Problem(
            "format-without-layout",
            f"{format.name} {_divided(target)}",
            found=beyond,
            remedy="leave out the layout (that of the source is detected), or add --to megatron",
        )
    if not target.ranks and options.layout.dp > 1:
        able = [name for name, each in written().items() if each.ranks and kind in each.holds]
        yield Problem(
            "ranks-not-for-format",
            f"{format.name} is the same for any number of data-parallel ranks",
            found=f"--dp {options.layout.dp}; the format is {chosen}",
            remedy=f"leave out --dp{', or pass --to '.join(['', *able])}",
        )
    if options.engine and MCORE not in target.names:
        able = [name for name, each in written().items() if MCORE in each.names and kind in each.holds]
        yield Problem(
            "engine-not-for-format",
            f"--engine is for Megatron checkpoints; {format.name} is the same for all engines",
            found=f"--engine {options.engine}; the format is {chosen}",
            remedy=f"leave out --engine (reshard detects who saved the source), or pass --to {' or --to '.join(able)}",
        )
    if options.adapter_for and (kind is CheckpointKind.MODEL or format.name != peft.NAME):
        yield Problem(
            "adapter-for-without-adapter",
            "--for is for adapters of PEFT",
            found=f"--for {options.adapter_for}; the output is "
            f"{'a model' if kind is CheckpointKind.MODEL else format.name}",
            remedy="leave out --for, or leave out --merge and pass --to peft for an adapter as the source",
        )
    if target.dtype and OutputTypes(options.dtype).wanted not in (None, dtype(target.dtype)):
        yield Problem(
            "format-dtype-fixed",
            f"{format.name} stores weights in {target.dtype} only",
            rule="the engine casts them to the dtype that its own config names",
            found=f"--dtype {options.dtype}",
            remedy="leave out --dtype",
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
    if options.quantize and target.quantizes and options.quantize not in target.quantizes:
        yield Problem(
            "quantize-value-of-another-format",
            f"{format.name} has no weights of this kind",
            expected=f"--quantize {', '.join(target.quantizes)}",
            found=f"--quantize {options.quantize}; the format is {chosen}",
            remedy="choose one of these, or another format: "
            + " or ".join(f"--to {each}" for each in _quantizing(options.quantize)),
        )
    if options.quantize and not target.quantizes:
        yield Problem(
            "quantized-output-unsupported",
            "this format cannot store quantized weights",
            found=f"--quantize {options.quantize}; the format is {chosen}",
            remedy=f"pass --to {' or --to '.join(_quantizing(options.quantize))}, or leave out --quantize",
        )


def _quantizing(how: str) -> list[str]:
    """The formats that have weights of a kind."""
    return [name for name, target in written().items() if how in target.quantizes]


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
        remedy=f"merge it into its base (--merge --base DIR), or keep it: --to {' or --to '.join(_able(kind))}",
    )


def _able(kind: CheckpointKind) -> list[str]:
    return [name for name, target in written().items() if kind in target.holds]


def _with_hinted_base(
    checkpoint: Checkpoint, options: ConversionOptions
) -> tuple[Checkpoint, ConversionOptions]:
    """If config or tokenizer is missing, use the base that another tool recorded, if it exists.

    `resolve` then checks that its config belongs to these weights.
    """
    if options.state_dict:
        return checkpoint, options
    there = companions.find_companions(checkpoint.sources, *checkpoint.folders)
    if options.base_path or (there.config and (there.has_tokenizer or options.no_tokenizer)):
        return checkpoint, options
    for hint in find_hints([checkpoint.path, checkpoint.root], checkpoint.sources, checkpoint.args):
        if hint.kind == BASE:
            checkpoint = replace(checkpoint, notes=[*checkpoint.notes, str(hint)])
            if hint.exists and (Path(hint.value) / "config.json").is_file():
                return checkpoint, replace(options, base=Path(hint.value))
    return checkpoint, options


def _resolved(checkpoint: Checkpoint, target: Target, options: ConversionOptions) -> ResolvedCheckpoint:
    """The model of a checkpoint. If names are not converted, its family need not be declared."""
    if options.state_dict and checkpoint.has_hub_names and not checkpoint.flat:
        return as_named(DescribedCheckpoint(checkpoint, {}, checkpoint.root, None))
    described = describe(checkpoint, options.base_path, options.family, options.trust)
    if not target.keeps_names:
        refuse_other_head(described)
        if described.config:
            target.check_config(described.config)
        resolved = resolve(described, options.trust, computes=target.judges_model)
        target.check_config(resolved.config)
        return resolved
    if options.family:
        return resolve(described, options.trust, computes=not checkpoint.has_hub_names)
    wrong = contradictions(described.config) if checkpoint.has_hub_names else []
    notes = [f"config.json contradicts itself: {text}" for text in wrong]
    told = replace(described.checkpoint, notes=[*checkpoint.notes, *notes])
    return resolve_if_declared(replace(described, checkpoint=told), options.trust)


def _content(
    source: ResolvedCheckpoint,
    kind: CheckpointKind,
    format: Format,
    target: Target,
    options: ConversionOptions,
) -> _RequestContent:
    """The tensors under the target's names."""
    checkpoint, model = source.checkpoint, source.model
    request = target.fit(
        Request(
            options,
            target.names[0] if target.keeps_names or not model else model.dialect(target.names),
            options.layout,
            model.padded(model.dims.vocab) if model else None,
            source.config,
            checkpoint.iteration,
            checkpoint.optimizer,
            engine=checkpoint.engine if checkpoint.has_megatron_names else None,
            native=checkpoint.native,
        )
    )
    if kind is CheckpointKind.ADAPTER:
        return _adapter(source, request)
    return _model(source, format.name, target, request)


def _plan(
    source: ResolvedCheckpoint,
    kind: CheckpointKind,
    format: Format,
    target: Target,
    options: ConversionOptions,
) -> Plan:
    """The plan, audited: tensors under the target's names, laid out in files, with companions and other files."""
    checkpoint, model = source.checkpoint, source.model
    content = _content(source, kind, format, target, options)
    found = output_companions.find_companions(checkpoint, content.request)
    if target.embeds:
        request = target.complete(output_companions.embedding(checkpoint, content.request, found))
        files = target.lay_out(request)
    else:
        request = target.complete(content.request)
        near = () if options.state_dict else output_companions.companion_files(checkpoint, request, found)
        files = [
            *target.lay_out(request),
            *(replace(file, path=(PurePath(target.beside) / file.path).as_posix()) for file in near),
        ]
    planned = {file.path for file in files}
    given = {name: path for name, path in options.beside.items() if name not in planned}
    files += [OutputFile.of_bytes(name, checkpoint.sources.read(path)) for name, path in given.items()]
    facts = output_companions.facts(checkpoint, format, request, content.dropped)
    facts["files"] = sorted(file.path for file in files)
    files.append(OutputFile.of_bytes("reshard.json", to_json(facts)))
    told = [*checkpoint.notes, *found.notes, *source.notes, *(model.notes if model else ())]
    plan = Plan(
        source=checkpoint.format,
        target=format.name,
        files=files,
        tensors=len(request.tensors),
        parameters=content.parameters,
        dropped=content.dropped,
        left_out=content.left_out,
        replicas=content.replicas,
        notes=[*dict.fromkeys([*told, *target.notes(request), *content.notes])],
        warnings=[*(model.warnings if model else source.warnings), *target.warnings(request)],
        facts=facts,
        load_with=target.load_with(request),
        afterwards=[*target.afterwards(request)],
        need=content.need.beside(target.need(request)),
        sources=checkpoint.sources,
        suffix=target.suffix,
        outputs=[*request.tensors, *(state for each in request.states.values() for state in each.values())],
    )
    plan.audit(plan.outputs)
    return plan


class _RequestContent(NamedTuple):
    """A request with its tensors, their parameters, dropped bytes by rule, replicas, notes, and the memory needed.

    `left_out` are the rules for tensors that have no place in the output.
    """

    request: Request
    parameters: int
    dropped: Counter[str]
    replicas: list[Replica]
    notes: list[str]
    need: MemoryNeed
    left_out: frozenset[str] = frozenset()


def _adapter(source: ResolvedCheckpoint, request: Request) -> _RequestContent:
    name = served_adapter.served if request.options.adapter_for else adapter_tensors.named
    request, base, notes = name(source.checkpoint, request)
    dropped = +(Counter(source.checkpoint.dropped) + Counter(base))
    return _RequestContent(
        request, elements(request.tensors), dropped, source.checkpoint.replicas, notes, NO_NEED
    )


def _model(source: ResolvedCheckpoint, format: str, target: Target, request: Request) -> _RequestContent:
    """The weights of a model, and its optimizer states if requested."""
    options, checkpoint = request.options, source.checkpoint
    dtype = target.dtype or options.dtype
    if options.with_optimizer or (target.dtype and not checkpoint.ordered_states):
        checkpoint = optimizer_tensors.with_masters(checkpoint, dtype)
    dropped = Counter(checkpoint.dropped)
    model, sized = source.model, request.model
    if model and sized:
        # Padding rows took part in the softmax during training: convert those that source and output both have.
        rows = min(sized.dims.padded_vocab, model.dims.padded_vocab)
        model, sized = model.with_vocabulary(rows), sized.with_vocabulary(rows)
        lost = model.dims.padded_vocab - sized.dims.padded_vocab
        dropped += lost_padding(checkpoint, model, lost, with_states=options.with_optimizer)
    request = replace(request, model=sized)
    logical = logical_tensors(replace(source, checkpoint=checkpoint, model=model))
    names = names_of(format, request, logical, target)
    left = names.dropped(logical)
    dropped += left
    states, notes, replicas = {}, [], logical.replicas
    if checkpoint.proof and (options.with_optimizer or optimizer_tensors.REPLACED in dropped):
        replicas = [*replicas, *checkpoint.proof()]
    if options.with_optimizer:
        states = optimizer_tensors.logical_states(logical)
        dropped -= optimizer_tensors.carried(checkpoint, target.states)
        if MASTER_STATE in checkpoint.states and MASTER_STATE not in target.states:
            notes.append("the fp32 masters are optimizer states too; --dtype float32 makes them the weights")
    if checkpoint.quantization and not (checkpoint.quantization.settings or settings_of(request.config)):
        notes.append(UNTOLD)
    types = OutputTypes(dtype, logical.tensors.values(), widened=checkpoint.dialect.widened)
    typed = target.typed(request, types.main) if target.typed else None
    tensors, settings, need = names.tensors(logical, types, typed), None, MemoryNeed.of(checkpoint.tensors)
    parameters = checkpoint.parameters if checkpoint.quantization else elements(tensors)
    if target.dtype and not options.dtype:
        notes += recast(format, logical, types)
    if options.quantize and target.quantized:
        request = replace(request, config={**request.config, "dtype": main_dtype(tensors)})
        tensors, settings, told, more = quantized(tensors, options.quantize, request.config)
        notes, need = [*notes, *told], need.beside(more)
    held = names.states({state: states[state] for state in states if state in target.states})
    request = replace(request, tensors=tensors, states=held, quantization=settings)
    return _RequestContent(request, parameters, dropped, replicas, notes, need, frozenset(left))
