"""The contract of a format: its name, how it is read, and what it can be written as.

From a checkpoint and the user's options, a plan makes a `Request`, which is the same for all formats. The `Target` of a
format declares what it can store, and lays the request out in files.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from reshard.algebra.dtypes import DType
from reshard.algebra.layout import Layout
from reshard.base.argument_checks import StrPath, parse_size
from reshard.base.errors import Problem, listed
from reshard.base.options import ADAPTERS, ADVANCED, BYTES, LAYOUT, About
from reshard.families import live_names
from reshard.families.family import ENGINE_TITLES, MCORE
from reshard.families.renaming import Renaming
from reshard.families.sized_family import Model
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint, Optimizer
from reshard.stores import source_path
from reshard.transfer.memory_budget import NO_NEED, MemoryNeed
from reshard.transfer.plan import OutputCommand, OutputFile, Planned
from reshard.transfer.source_files import Sources

HUB, LIVE = "hf", "live"
"""The Hub's names, and those in the memory of transformers; all others are a format's own, or dialects of families."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER_STATE = "fp32"

KEEPS_ITS_DTYPE = ("e_score_correction_bias", "expert_bias")
"""Router biases are fp32 whatever the model's dtype: transformers and Megatron-Core both keep them so."""

ROUTER_WEIGHT = re.compile(r"\.(?:gate|router)\.(?:\w+\.)*weight$")
"""The weights of a router, which transformers 5.24 keeps in float32 in most models, whatever the others are in."""


SHARD_SIZE = 5_000_000_000
"""The most bytes of a file of weights, in formats that divide them, unless something else is asked for."""


class CheckpointKind(Enum):
    """What a checkpoint contains: a model, a LoRA adapter, or an adapter of Megatron-Core, whose linears are fused."""

    MODEL = "model"
    ADAPTER = "adapter"
    FUSED_ADAPTER = "adapter of fused linears"


class AverageOf(NamedTuple):
    """Several checkpoints of one model as a source, each with its weight; the weights add up to one."""

    paths: tuple[Path, ...]
    weights: tuple[float, ...]

    def at(self, place: Callable[[Path], Path]) -> AverageOf:
        """The same checkpoints by other paths."""
        return AverageOf(tuple(map(place, self.paths)), self.weights)

    def as_dict(self) -> dict[str, Any]:
        """Paths and weights, for a record."""
        return {"paths": list(map(str, self.paths)), "weights": list(self.weights)}

    @staticmethod
    def of_dict(told: Mapping[str, Any]) -> AverageOf:
        """The paths and weights in a record."""
        return AverageOf(tuple(map(Path, told["paths"])), tuple(told["weights"]))


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How a checkpoint is read. Each field is a flag of the same name, and an argument."""

    base: Annotated[StrPath | None, About("Hugging Face folder with config and tokenizer.", "PATH")] = None
    iteration: Annotated[
        Iteration | None,
        About(
            "Step of a training run to read. [default: the one that its tracker names]",
            "N|release",
            choices=("release",),
        ),
    ] = None
    family: Annotated[
        str | None,
        About("Model family of SRC, overriding its config.", "NAME", names="family", group=ADVANCED),
    ] = None
    dtype: Annotated[
        str | None, About("Convert weights to float32, bfloat16 or float16.", "DTYPE", names="dtype")
    ] = None
    strip: Annotated[
        tuple[str, ...],
        About("Remove MARK from tensor names, for example `_orig_mod.`.", "MARK", group=ADVANCED),
    ] = ()
    merge: Annotated[bool, About("Merge SRC, a LoRA adapter, into the model at --base.", group=ADAPTERS)] = (
        False
    )
    adapter: Annotated[
        str | None, About("Adapter to read, if SRC contains several.", "NAME", group=ADAPTERS)
    ] = None
    lora_alpha: Annotated[
        float | None,
        About("Alpha of the adapter, if no file records it.", "N", least=-math.inf, group=ADAPTERS),
    ] = None

    @cached_property
    def base_path(self) -> Path | None:
        """The folder `base`, on this machine or in a store."""
        return None if self.base is None else source_path(self.base)


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is written. Each field is a flag of the same name, and an argument."""

    to: Annotated[
        str | None,
        About(
            "Format of the output, or an alias such as hf or mcore. [default: huggingface, unless SRC is that]",
            names="format",
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
        About("Layers of each pipeline stage, for example 10,12,12,10.", "N,N,…", group=LAYOUT),
    ] = ()
    vocab_divisible_by: Annotated[
        int | None,
        About(
            "Pad the vocabulary to a multiple of N × TP. [default: that of SRC, else 128]",
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
            "Layer spec whose tensor names to write. [default: that of SRC, else transformer_engine]",
            choices=("transformer_engine", "local"),
            group=LAYOUT,
        ),
    ] = None
    quantize: Annotated[
        str | None,
        About(
            "Quantize the linear layers of a Hugging Face output (fp8, fp8-ue8m0, nvfp4; mxfp4 is for gpt-oss only), "
            "or choose the type of a GGUF output (f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, tq1_0, tq2_0, mxfp4), "
            "or the bits and the group of an MLX output (affine-2, -3, -4, -5, -6 or -8, in groups of 64, or "
            "affine-4-32 …).",
            "KIND",
            names="quantization",
        ),
    ] = None
    max_shard_size: Annotated[
        int | str | None,
        About("Maximum size of a weights file. [default: 5GB; GGUF: one file]", "SIZE", unit=BYTES),
    ] = None
    adapter_for: Annotated[
        str | None,
        About(
            "Write the adapter as this library applies it completely. [default: with the layout of SRC]",
            names="library",
            flag="--for",
            group=ADAPTERS,
        ),
    ] = None
    trust: Annotated[
        str,
        About(
            "Which to believe where config.json and the arguments in a Megatron checkpoint disagree.",
            choices=("checkpoint", "config"),
            group=ADVANCED,
        ),
    ] = "checkpoint"
    no_tokenizer: Annotated[bool, About("Continue without a tokenizer.", group=ADVANCED)] = False
    with_optimizer: Annotated[
        bool, About("Convert optimizer states too, if both formats can store them.", group=ADVANCED)
    ] = False

    @cached_property
    def layout(self) -> Layout:
        """The parallel sizes of the output."""
        etp = self.tp if self.etp is None else self.etp
        return Layout(self.tp, self.pp, self.vpp, self.ep, etp, self.stages, dp=self.dp or 1)

    @property
    def shard_size(self) -> int:
        """The most bytes of a file of weights, in formats that divide them."""
        return parse_size(self.max_shard_size or SHARD_SIZE, "--max-shard-size")


@dataclass(frozen=True, kw_only=True)
class ConversionOptions(Opening, Output):
    """The flags of `reshard convert` that decide what is in the output, and files to copy into it, by their names.

    With `average`, the source is the last of its checkpoints.
    """

    average: AverageOf | None = None
    beside: Mapping[str, Path] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All options, for a record; of the files in `beside`, only the names."""
        told = {
            "base": None if self.base is None else str(self.base),
            "layout": asdict(self.layout),
            "max_shard_size": self.max_shard_size and self.shard_size,
            "tokenizer": not self.no_tokenizer,
            "average": self.average and self.average.as_dict(),
        }
        found = {name: told[name] if name in told else getattr(self, name) for name in OPTIONS_0_2_0}
        return {**found, "beside": sorted(self.beside)}

    @property
    def meant(self) -> dict[str, Any]:
        """What they ask for: the same for a value that is left out as for its default."""
        return {**self.as_dict(), "max_shard_size": self.shard_size, "beside": dict(self.beside)}

    @staticmethod
    def of_dict(told: Mapping[str, Any]) -> ConversionOptions:
        """The options in a record, without `beside`. Raises TypeError or ValueError if it has unknown ones.

        Records of version 0.2.0 contain only options that differed from its defaults.
        """
        found: dict[str, Any] = {**OPTIONS_0_2_0, **told}
        layout: dict[str, Any] = {**OPTIONS_0_2_0["layout"], **found.pop("layout")}
        del layout["cp"]
        found |= {**layout, "stages": tuple(layout["stages"])}
        found["base"] = None if found["base"] is None else Path(found["base"])
        found["strip"] = tuple(found["strip"])
        found["no_tokenizer"] = not found.pop("tokenizer")
        found["average"] = found["average"] and AverageOf.of_dict(found["average"])
        return ConversionOptions(**{name: value for name, value in found.items() if name != "beside"})


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
    "average": None,
}
"""What options meant in version 0.2.0 that a record does not contain. These values never change: they describe
outputs that exist. A new option is added with the value that had its effect before."""


PlannedStates = Mapping[str, Mapping[str, Planned]]
"""The planned tensors of each optimizer state, by the name of the weight that they belong to."""


@dataclass(frozen=True)
class Request:
    """What a format lays out. `tensors` are complete, under the names of `dialect`; `states` are the optimizer states.

    `model` has the sizes of the output, and is None for an undeclared family; `config` is its Hugging Face config.
    `iteration` and `optimizer` are those of the source. `adapter` are the settings of an adapter, None for a model.
    `quantization` are the settings of weights that the plan quantizes. `engine` is the one that saved a Megatron
    source, and `native` is what only the format of the source knows. For a target that embeds them, `companions` are
    the config and the tokenizer of the output, `name` is that of the model, and `inside` is what the target makes of
    both.
    """

    options: ConversionOptions
    dialect: str
    layout: Layout
    model: Model | None
    config: Mapping[str, Any]
    iteration: Iteration | None = None
    optimizer: Optimizer | None = None
    tensors: Sequence[Planned] = ()
    states: PlannedStates = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    quantization: Mapping[str, Any] | None = None
    engine: str | None = None
    native: Any = None
    companions: Mapping[str, bytes] = field(default_factory=dict)
    name: str = ""
    inside: Any = None

    @cached_property
    def main_dtype(self) -> str:
        """The dtype of most elements: what config.json and Megatron-LM's arguments call the model's dtype."""
        return main_dtype(self.tensors)

    @property
    def is_in_memory(self) -> bool:
        """Whether the tensors have the names of a live model."""
        return self.dialect == LIVE

    @property
    def is_of_megatron_core(self) -> bool:
        """Whether Megatron-Core itself computes with the tensors, and not an engine built on it."""
        return self.dialect == MCORE

    @property
    def declared(self) -> Model:
        """The model, for a target whose names a family must declare."""
        assert self.model is not None
        return self.model

    def called(self, plain: str) -> str:
        """The name on the Hub, or in a live model, of the tensor that a plain language model calls `plain`."""
        family = self.model.family if self.model else None
        name = family.hub_name(plain) if family else plain
        return family.live.to_live(name) if family and family.live and self.is_in_memory else name

    @cached_property
    def again(self) -> Mapping[str, str]:
        """The names that a live model has for weights that it has under another name, too, which is the value."""
        live = live_names(self.config, self.model.family.name if self.model else None)
        if live and live.tied and not self.model:
            return live.tied
        return {self.called(HEAD): self.called(EMBEDDING)} if self.tied else {}

    @property
    def tied(self) -> bool:
        """Whether the model's head is tied to its embedding."""
        return self.model.dims.tied if self.model else bool(self.config.get("tie_word_embeddings"))


def main_dtype(tensors: Sequence[Planned]) -> str:
    """The dtype of most elements."""
    counted: Counter[str] = Counter()
    for tensor in tensors:
        counted[tensor.dtype.name] += tensor.nbytes
    return counted.most_common(1)[0][0]


def stateless(request: Request) -> list[str]:
    """A note that names the tensors without states, if any: an engine that trains them needs these."""
    if not request.states:
        return []
    apart = (*KEEPS_ITS_DTYPE, *([HEAD] if request.tied else []))
    stateful = request.states[MOMENTS[0]]
    names = [tensor.name for tensor in request.tensors if tensor.name not in stateful]
    frozen = sorted(name for name in names if not name.endswith(apart))
    what = f"the optimizer has no states of {listed(frozen, 1)}" if frozen else ""
    return [f"{what}: load them in a run that freezes the same tensors"] if frozen else []


def as_asked(request: Request) -> Request:
    """The request, unchanged."""
    return request


def nothing(request: Request) -> list[str]:
    """No notes."""
    return []


def no_memory(request: Request) -> MemoryNeed:
    """Nothing is computed for the format."""
    return NO_NEED


def no_problems(request: Request) -> list[Problem]:
    """No warnings."""
    return []


def nothing_else(request: Request) -> list[OutputCommand]:
    """No commands."""
    return []


def nowhere(request: Request, name: str) -> None:
    """No tensor is left out."""


@dataclass(frozen=True)
class Target:
    """What a format can be written as.

    `lay_out` makes the files of a request. `names` are those of the Hub, of a live model, or the dialects of an engine,
    of which the first that a family declares is used; or, for a format whose names `renames` makes of the Hub's for the
    model of a config, None if it does not know that model. `leaves_out` tells the rule by which a tensor has no place.
    `layout` are the axes by which files belong to ranks, so that users can choose their sizes; `ranks` says that they
    belong to data-parallel ranks, of which users pass the number. `states` are the optimizer states that it stores.
    `dtype` is the only dtype of its weights, if there is only one; `typed` gives each tensor its dtype, from that of
    most weights. `quantized` says that it can store the scales of a source, and `quantizes` are the values of
    `--quantize`. `embeds` says that config and tokenizer are in its files, and not beside them; a file with `suffix`
    may then be the complete output, and is not divided unless users ask for it. `beside` is the folder of config and
    tokenizer, if they are not next to the weights. `judges_model` says that its engine computes what the entries of
    families describe.
    `fit` sets model and layout to the engine's sizes, before tensors are named, and refuses what the engine cannot
    store. `complete` afterwards adds what the engine stores differently, which takes the memory that `need` tells.
    `notes`, `warnings` and `load_with` are what users should know and type, in addition to the folder, and `afterwards`
    are commands for the output, each with its purpose.
    """

    lay_out: Callable[[Request], list[OutputFile]]
    names: tuple[str, ...] = (HUB,)
    holds: frozenset[CheckpointKind] = frozenset({CheckpointKind.MODEL})
    layout: tuple[str, ...] = ()
    ranks: bool = False
    states: tuple[str, ...] = ()
    dtype: str | None = None
    typed: Callable[[Request, DType], Callable[[str, tuple[int, ...]], DType]] | None = None
    quantized: bool = False
    quantizes: tuple[str, ...] = ()
    embeds: bool = False
    suffix: str = ""
    beside: str = ""
    judges_model: bool = True
    renames: Callable[[Mapping[str, Any]], tuple[Renaming, ...] | None] | None = None
    leaves_out: Callable[[Request, str], str | None] = nowhere
    fit: Callable[[Request], Request] = as_asked
    complete: Callable[[Request], Request] = as_asked
    need: Callable[[Request], MemoryNeed] = no_memory
    notes: Callable[[Request], list[str]] = nothing
    warnings: Callable[[Request], list[Problem]] = no_problems
    afterwards: Callable[[Request], Iterable[OutputCommand]] = nothing_else
    load_with: Callable[[Request], list[str]] = nothing

    @property
    def keeps_names(self) -> bool:
        """Whether its names are derived from Hub names, so that an undeclared family can be written."""
        return self.takes_any_model or self.renames is not None

    @property
    def takes_any_model(self) -> bool:
        """Whether it can store a model of which only the Hub's names are known."""
        return self.names[0] in (HUB, LIVE)


@dataclass(frozen=True)
class Format:
    """One format. `what` describes the files in one line; `target` is None for a read-only format.

    `aliases` are other names that users may type for it; `instead` is what to write instead of a read-only format.
    `parts` are patterns for the names of files that belong to a checkpoint but are not read to open it.
    `files` are names in the folder of a checkpoint, for which a web server without listings is asked. `naming` are
    those of JSON files that name others beside them, each with the function that finds these in its content.
    `seen` are expressions for paths of such checkpoints in logs, by the names of the tools that write them. `judged`
    are the tools that it is tested against: they wrote what is read, and load what is written.
    `detect` checks by file names whether a path is in this format; it is quick and does not raise. `open` reads only
    headers and metadata, through the sources that it gets, takes the requested iteration, or None, and raises
    ReshardError.
    """

    name: str
    what: str
    detect: Callable[[Path], bool]
    open: Callable[[Path, Sources, Iteration | None], Checkpoint]
    target: Target | None = None
    aliases: tuple[str, ...] = ()
    instead: str = ""
    parts: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    naming: Mapping[str, Callable[[Any], Iterable[str]]] = field(default_factory=dict)
    seen: Mapping[str, str] = field(default_factory=dict)
    judged: tuple[str, ...] = ()

    @property
    def all_names(self) -> tuple[str, ...]:
        """Its name and all aliases."""
        return (self.name, *self.aliases)
