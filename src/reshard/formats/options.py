"""The options of `reshard convert` that decide what is in the output: how a source is read, and what is written.

How a conversion runs is in `commands/options.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from reshard.algebra.layout import Layout
from reshard.base.options import ADAPTERS, ADVANCED, BYTES, LAYOUT, About, options_of
from reshard.base.shared_options import DtypeOption, MergeOption, StepOption
from reshard.base.values import StrPath, parse_size
from reshard.families.family import ENGINE_TITLES
from reshard.stores import source_path

SHARD_SIZE = "5GB"
"""The largest file of weights, in formats that divide them, unless something else is asked for."""
VOCABULARY_UNIT = 128
"""Megatron-LM pads the vocabulary to a multiple of this times the tensor-parallel size, unless told otherwise."""
SERVING_ENGINES = ("vllm", "sglang", "peft")
"""What adapters are written for (`adapters/serving_engines.py`)."""
LAYER_SPECS = ("transformer_engine", "local")
"""Implementations of Megatron-Core's layers, which name tensors differently. The first is its default."""

HYBRID, GPT = MEGATRON_MODELS = ("hybrid", "gpt")
"""The classes of Megatron-Core's models, HybridModel and GPTModel, which name the same weights differently."""


@dataclass(frozen=True, kw_only=True)
class BaseOption:
    """The model that a checkpoint belongs to."""

    base: Annotated[StrPath | None, About("Hugging Face folder with config and tokenizer.", "PATH")] = None

    fill_from: Annotated[
        StrPath | None,
        About("Complete model that provides the tensors SRC lacks; also used as --base.", "PATH"),
    ] = None

    @cached_property
    def base_path(self) -> Path | None:
        """The folder `base`, or else `fill_from`, on this machine or in a store."""
        base = self.base or self.fill_from
        return None if base is None else source_path(base)

    @cached_property
    def fill_path(self) -> Path | None:
        """The folder `fill_from`, on this machine or in a store."""
        return None if self.fill_from is None else source_path(self.fill_from)

    @property
    def base_paths(self) -> tuple[Path, ...]:
        """The folders beside the source that are read."""
        return tuple(dict.fromkeys(filter(None, (self.base_path, self.fill_path))))


@dataclass(frozen=True, kw_only=True)
class Opening(MergeOption, DtypeOption, BaseOption):
    """How a checkpoint is opened. Each field is a flag of the same name, and an argument."""

    family: Annotated[
        str | None,
        About(
            "Model family of SRC, overriding its config.",
            "NAME",
            group=ADVANCED,
            only_reads=True,
        ),
    ] = None
    strip: Annotated[
        tuple[str, ...],
        About(
            "Remove MARK from tensor names, for example `_orig_mod.`.",
            "MARK",
            group=ADVANCED,
            expected='several strings, for example ("_orig_mod.",)',
        ),
    ] = ()

    adapter: Annotated[
        str | None, About("Adapter to read, if SRC contains several.", "NAME", group=ADAPTERS)
    ] = None
    lora_alpha: Annotated[
        float | None,
        About("Alpha of the adapter, if no file records it.", "N", least=-math.inf, group=ADAPTERS),
    ] = None


@dataclass(frozen=True, kw_only=True)
class FolderOutput:
    """What also matters for an output without ranks. Each field is a flag of the same name, and an argument."""

    quantize: Annotated[
        str | None,
        About(
            "Quantize the linear layers of a Hugging Face output (fp8, fp8-ue8m0, nvfp4; mxfp4 is for gpt-oss only), "
            "or choose the type of a GGUF output (f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, tq1_0, tq2_0, mxfp4), "
            "or the bits and the group of an MLX output (affine-2, -3, -4, -5, -6 or -8, in groups of 64, or "
            "affine-4-32 …).",
            "KIND",
        ),
    ] = None
    max_shard_size: Annotated[
        int | str | None,
        About(f"Maximum size of a weights file. [default: {SHARD_SIZE}; GGUF: one file]", "SIZE", unit=BYTES),
    ] = None
    trust: Annotated[
        str,
        About(
            "Which to believe where config.json and the checkpoint disagree.",
            choices=("checkpoint", "config"),
            group=ADVANCED,
            only_reads=True,
        ),
    ] = "checkpoint"
    no_tokenizer: Annotated[bool, About("Continue without a tokenizer.", group=ADVANCED, only_reads=True)] = (
        False
    )

    @property
    def shard_size(self) -> int:
        """The most bytes of a file of weights, in formats that divide them."""
        return parse_size(self.max_shard_size or SHARD_SIZE, "--max-shard-size")


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is written. Each field is a flag of the same name, and an argument."""

    to: Annotated[
        str | None,
        About(
            "Format of the output, or an alias such as hf or mcore. [default: huggingface, unless SRC is that]",
        ),
    ] = None
    tp: Annotated[int, About("Tensor-parallel size of the output.", "N", least=1, group=LAYOUT)] = 1
    pp: Annotated[int, About("Pipeline-parallel size of the output.", "N", least=1, group=LAYOUT)] = 1
    vpp: Annotated[int, About("Virtual pipeline chunks per stage.", "N", least=1, group=LAYOUT)] = 1
    ep: Annotated[int, About("Expert-parallel size of the output.", "N", least=1, group=LAYOUT)] = 1
    etp: Annotated[
        int | None, About("Expert-tensor-parallel size. [default: --tp]", "N", least=1, group=LAYOUT)
    ] = None
    dp: Annotated[
        int | None,
        About(
            "Data-parallel size: how many ranks will load the output. For fsdp-ranks, which needs it.",
            "N",
            least=1,
            group=LAYOUT,
        ),
    ] = None
    stages: Annotated[
        tuple[int, ...],
        About(
            "Layers of each pipeline stage, for example 10,12,12,10.",
            "N,N,…",
            group=LAYOUT,
            expected="whole numbers with commas between them, such as 10,12,12,10",
        ),
    ] = ()
    vocab_divisible_by: Annotated[
        int | None,
        About(
            f"Pad the vocabulary to a multiple of N × TP. [default: that of SRC, else {VOCABULARY_UNIT}]",
            "N",
            least=1,
            group=LAYOUT,
        ),
    ] = None
    engine: Annotated[
        str | None,
        About(
            "Library that will load the Megatron checkpoint. [default: the one that saved SRC]",
            choices=tuple(ENGINE_TITLES),
            group=LAYOUT,
        ),
    ] = None
    transformer_impl: Annotated[
        str | None,
        About(
            f"Layer spec whose tensor names to write. [default: that of SRC, else {LAYER_SPECS[0]}]",
            choices=LAYER_SPECS,
            group=LAYOUT,
        ),
    ] = None
    megatron_model: Annotated[
        str | None,
        About(
            f"Megatron-Core's class that will load it: HybridModel or GPTModel. [default: that of SRC, else {GPT}]",
            choices=MEGATRON_MODELS,
            group=LAYOUT,
        ),
    ] = None
    adapter_for: Annotated[
        str | None,
        About(
            "Write the adapter as this library applies it completely. [default: with the layout of SRC]",
            flag="--for",
            choices=SERVING_ENGINES,
            group=ADAPTERS,
        ),
    ] = None
    state_dict: Annotated[
        str | None,
        About(
            "Write the weights alone, under the names that SRC has for them, without config and tokenizer: to "
            "pytorch_model.bin (bin) or model.safetensors (safetensors).",
            choices=("bin", "safetensors"),
            group=ADVANCED,
        ),
    ] = None
    with_optimizer: Annotated[
        bool, About("Convert optimizer states too, if both formats can store them.", group=ADVANCED)
    ] = False

    @cached_property
    def layout(self) -> Layout:
        """The parallel sizes of the output."""
        etp = self.tp if self.etp is None else self.etp
        return Layout(self.tp, self.pp, self.vpp, self.ep, etp, self.stages, dp=self.dp or 1)


@dataclass(frozen=True, kw_only=True)
class ConversionOptions(FolderOutput, Opening, StepOption, Output):
    """The flags of `reshard convert` that decide what is in the output, and files to copy into it, by their names."""

    beside: Mapping[str, Path] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All options, for a record; of the files in `beside`, only the names."""
        converted = {
            "base": None if self.base is None else str(self.base),
            "fill_from": None if self.fill_from is None else str(self.fill_from),
            "layout": asdict(self.layout),
            "max_shard_size": self.max_shard_size and self.shard_size,
            "tokenizer": not self.no_tokenizer,
        }
        names = [
            *OPTIONS_0_2_0,
            *(each.name for each in options_of(ConversionOptions) if each.name not in WITHIN),
        ]
        options = {name: converted[name] if name in converted else getattr(self, name) for name in names}
        return {**options, "beside": sorted(self.beside)}

    @property
    def meant(self) -> dict[str, Any]:
        """What they ask for: the same for a value that is left out as for its default."""
        return {**self.as_dict(), "max_shard_size": self.shard_size, "beside": dict(self.beside)}

    @staticmethod
    def of_dict(record: Mapping[str, Any]) -> ConversionOptions:
        """The options in a record, without `beside`. Raises TypeError or ValueError if it has unknown ones.

        Records of version 0.2.0 contain only options that differed from its defaults.
        """
        options: dict[str, Any] = {**OPTIONS_0_2_0, **record}
        if options.get("average", record) is None:  # of versions that could average checkpoints
            del options["average"]
        layout: dict[str, Any] = {**OPTIONS_0_2_0["layout"], **options.pop("layout")}
        del layout["cp"]
        options |= {**layout, "stages": tuple(layout["stages"])}
        options["base"] = None if options["base"] is None else Path(options["base"])
        options["strip"] = tuple(options["strip"])
        options["no_tokenizer"] = not options.pop("tokenizer")
        return ConversionOptions(**{name: value for name, value in options.items() if name != "beside"})


OPTIONS_0_2_0: Mapping[str, Any] = {
    "to": None,
    "base": None,
    "layout": {"tp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "stages": (), "cp": 1, "dp": 1},
    "iteration": None,
    "family": None,
    "engine": None,
    "trust": "checkpoint",
    "dtype": None,
    "quantize": None,
    "max_shard_size": 5_000_000_000,
    "vocab_divisible_by": None,
    "transformer_impl": None,
    "tokenizer": True,
    "strip": (),
    "merge": False,
    "adapter": None,
    "lora_alpha": None,
    "adapter_for": None,
    "with_optimizer": False,
}
"""What options meant in version 0.2.0 that a record does not contain. These values never change: they describe
outputs that exist. Records always contain newer options; if a record of this version has none, it means the default."""
WITHIN = {*OPTIONS_0_2_0["layout"], "no_tokenizer"}
"""Options that a record contains under `layout`, or as their opposite."""
