"""The contract of a format: its name, how it is read, and what it can be written as.

From a checkpoint and the user's options, a plan makes a `Request`, which is the same for all formats. The `Target` of a
format declares what it can store, and lays the request out in files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from reshard.algebra.dtypes import DType
from reshard.algebra.layout import Layout
from reshard.base.errors import Problem, listed
from reshard.families import live_names
from reshard.families.family import MCORE
from reshard.families.renaming import Renaming
from reshard.families.sized_family import Model
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint, Optimizer
from reshard.formats.options import ConversionOptions
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


class CheckpointKind(Enum):
    """What a checkpoint contains: a model, a LoRA adapter, or an adapter of Megatron-Core, whose linears are fused."""

    MODEL = "model"
    ADAPTER = "adapter"
    FUSED_ADAPTER = "adapter of fused linears"


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


def any_model(config: Mapping[str, Any]) -> None:
    """Every model is written."""


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
    may then be the complete output, and is not divided unless users ask for it. `state_dict` says that it can be the
    weights alone, with neither of these. `beside` is the folder of config and
    tokenizer, if they are not next to the weights. `judges_model` says that its engine computes what the entries of
    families describe.
    `check_config` raises ReshardError for a config whose model the format cannot describe, before its family is found.
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
    state_dict: bool = False
    beside: str = ""
    judges_model: bool = True
    renames: Callable[[Mapping[str, Any]], tuple[Renaming, ...] | None] | None = None
    leaves_out: Callable[[Request, str], str | None] = nowhere
    check_config: Callable[[Mapping[str, Any]], None] = any_model
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
