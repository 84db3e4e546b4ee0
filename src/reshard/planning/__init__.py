"""Plan a conversion: the tensors of the target, each made of the source's logical tensors, and its files.

One module for each kind of target; `TARGETS` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from reshard.adapters import is_adapter
from reshard.adapters import megatron as megatron_adapters
from reshard.algebra.layout import Layout
from reshard.errors import ReshardError
from reshard.formats import companions, open_checkpoint
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.provenance import BASE, find_hints
from reshard.model.dequantization import BFLOAT16, dequantized
from reshard.model.resolve import Resolved, config_of, contradictions, resolve, resolve_if_declared
from reshard.planning import dcp, deepspeed, hub, internlm, megatron, megatron_adapter, merge, peft
from reshard.planning.common import Options, Source, Types
from reshard.planning.optimizer import refuse_unable
from reshard.transfer.plan import Plan
from reshard.transfer.sources import OnStep, noted

__all__ = ["TARGETS", "Options", "plan_conversion"]

TARGETS: dict[str, Callable[[Source], Plan]] = {
    "huggingface": hub.plan,
    "dcp": dcp.plan,
    "megatron": partial(megatron.plan, target="megatron"),
    "megatron-legacy": partial(megatron.plan, target="megatron-legacy"),
    "deepspeed": deepspeed.plan,
    "internlm": internlm.plan,
    "peft": peft.plan,
}
"""What can be written, by the name of its format."""

NAMED_AS_THE_HUB = {"huggingface", "dcp", "deepspeed"}
"""Targets whose names are the hub's, so that a family which nobody declared can be carried there."""

WITHOUT_LAYOUT = {
    "huggingface": "a Hugging Face folder",
    "dcp": "a distributed checkpoint of torch",
    "deepspeed": "a universal checkpoint of DeepSpeed",
    "peft": "an adapter",
}
"""Targets that no ranks share."""

WITHOUT_MODEL = {"peft"}
"""Targets that hold something else than a model."""

KEEPS_QUANTIZED = {"huggingface"}
"""Targets that quantized weights are copied to. The others have no place for scales: weights become plain ones."""

OF_ADAPTERS = {"peft": peft.plan, "megatron": megatron_adapter.plan}
"""What an adapter can be written as, without its base."""

WITH_OPTIMIZER = {"dcp", "deepspeed", "megatron"}
"""Targets that hold a tensor for each optimizer state of a tensor."""


def plan_conversion(source: Path, options: Options, on_step: OnStep = lambda step: None) -> Plan:
    """Plan the conversion of `source`; raises ReshardError. `on_step` hears what is done next.

    Reads headers and metadata only, and the lora_A of projections that may share one.
    """
    with noted(source, *([options.base] if options.base else [])) as sources:
        with sources.counted(on_step):
            checkpoint = open_checkpoint(source, options.iteration, options.strip)
        on_step("planning")
        plan = _planned(source, checkpoint, options)
    plan.sources = sources
    return plan


def _planned(source: Path, checkpoint: Checkpoint, options: Options) -> Plan:
    if checkpoint.problems:
        raise ReshardError(checkpoint.problems)
    if megatron_adapters.holds_pairs(checkpoint):
        checkpoint = merge.hub_adapter(checkpoint, options)
    if options.merge:
        checkpoint, options = merge.merged_source(checkpoint, options)
    target = options.to or _default_target(checkpoint, options)
    if target not in OF_ADAPTERS and is_adapter(checkpoint):
        raise merge.unmerged(checkpoint, target)
    if not target:
        raise ReshardError(
            "the source is a Hugging Face folder already",
            file=str(source),
            remedy=f"say what it should become: --to {', --to '.join(TARGETS)}",
        )
    if target in WITHOUT_LAYOUT and options.layout != Layout():
        raise ReshardError(
            f"{WITHOUT_LAYOUT[target]} has no parallel layout",
            found=str(options.layout),
            remedy="leave out the layout (that of the source is detected), or add --to megatron",
        )
    if options.quantize and target not in KEEPS_QUANTIZED:
        raise ReshardError(
            "this format has no place for quantized weights",
            found=f"--quantize {options.quantize} --to {target}",
            remedy="pass --to huggingface, or leave out --quantize",
        )
    if checkpoint.quantization and (target not in KEEPS_QUANTIZED or options.dtype or options.quantize):
        flags = {"--dtype": options.dtype, "--quantize": options.quantize, "--to": target}
        wanted = next(f"{flag} {value}" for flag, value in flags.items() if value)
        dtype = Types(options.dtype).wanted or BFLOAT16
        checkpoint = dequantized(checkpoint, dtype, wanted)
    if options.with_optimizer:
        refuse_unable(checkpoint, target, WITH_OPTIMIZER)
    options = _with_hinted_base(checkpoint, options)
    if target in WITHOUT_MODEL or is_adapter(checkpoint):
        resolved = Resolved(checkpoint, None, {})
        return OF_ADAPTERS[target](Source(resolved, options))
    return TARGETS[target](Source(_resolved(checkpoint, target, options), options))


def _default_target(checkpoint: Checkpoint, options: Options) -> str:
    """An adapter stays one, all else becomes a Hugging Face folder; "" if it is one already."""
    if is_adapter(checkpoint):
        return "peft"
    return "huggingface" if options.merge or options.quantize or checkpoint.format != "huggingface" else ""


def _resolved(checkpoint: Checkpoint, target: str, options: Options) -> Resolved:
    """The model of a checkpoint. Where names stay as they are, it may be of a family that nobody declared."""
    if target in NAMED_AS_THE_HUB and not options.family:
        wrong = (
            contradictions(config_of(checkpoint, options.base) or {}) if checkpoint.dialect == "hf" else []
        )
        checkpoint.notes += [f"config.json contradicts itself: {text}" for text in wrong]
        return resolve_if_declared(checkpoint, options.base, options.trust)
    computes = checkpoint.dialect != "hf" or target not in NAMED_AS_THE_HUB
    return resolve(checkpoint, options.base, options.family, options.trust, computes=computes)


def _with_hinted_base(checkpoint: Checkpoint, options: Options) -> Options:
    """Where config or tokenizer is missing, take the base that another tool noted, if it is there.

    `resolve` then checks that its config belongs to these weights.
    """
    beside = companions.find_companions(*checkpoint.folders)
    if options.base or (beside.config and (beside.has_tokenizer or not options.tokenizer)):
        return options
    for hint in find_hints([checkpoint.path, checkpoint.root], checkpoint.args):
        if hint.kind == BASE:
            checkpoint.notes.append(str(hint))
            if hint.exists and (Path(hint.value) / "config.json").is_file():
                return replace(options, base=Path(hint.value))
    return options
