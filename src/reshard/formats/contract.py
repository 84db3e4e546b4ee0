"""The contract of a format: its name, how it is read, and what it can be written as.

From a checkpoint and the user's options, a plan makes a `Request`, which is the same for all formats. The `Target` of a
format declares what it can store, and lays the request out in files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from reshard.algebra.dtypes import DType, castable, of_most_bytes
from reshard.algebra.layout import Layout
from reshard.base.errors import Problem, ReshardError, listed, reading_values
from reshard.families import live_names
from reshard.families.config_map import portable_config
from reshard.families.family import MCORE
from reshard.families.renaming import Renaming
from reshard.families.sized_family import Model
from reshard.folders.companion_names import CONFIG
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.optimizer import Adam
from reshard.formats.options import ConversionOptions
from reshard.formats.quantization import plain_config, settings_as_told, settings_of
from reshard.transfer.memory_budget import NO_NEED, MemoryNeed
from reshard.transfer.plan import OutputCommand, OutputFile, Planned
from reshard.transfer.source_files import Sources

HUB, LIVE = "hf", "live"
"""The Hub's names, and those in the memory of transformers; all others are a format's own, or dialects of families."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

KEEPS_ITS_DTYPE = ("e_score_correction_bias", "expert_bias")
"""Router biases are fp32 whatever the model's dtype: transformers and Megatron-Core both keep them so."""

KEPT_IN_FLOAT32 = re.compile(
    r"\.(?:gate|router)\.(?:\w+\.)*(?:weight|bias)$|\bhc_(?:attn|ffn|head)_\w+$|\.(?:attn_sink|ape)$"
)
"""What transformers 5.24 keeps in float32 in most models, whatever the others are in: the weights of a router.

And in DeepSeek-V4 hyper-connections, attention sinks and positions within a compressed window, by the Hub's names.
"""


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
    `source` is the checkpoint that they are of. `adapter` are the settings of an adapter, None for a model.
    `quantization` are the settings of weights that the plan quantizes. For a target that embeds them, `companions` are
    the config and the tokenizer of the output, and `name` is that of the model. A config inside of a file of the
    format is `hub_config`.
    """

    options: ConversionOptions
    dialect: str
    layout: Layout
    model: Model | None
    config: Mapping[str, Any]
    source: Checkpoint
    tensors: Sequence[Planned] = ()
    states: PlannedStates = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    quantization: Mapping[str, Any] | None = None
    companions: Mapping[str, bytes] = field(default_factory=dict)
    name: str = ""

    @cached_property
    def main_dtype(self) -> str:
        """The dtype of most elements: what config.json and Megatron-LM's arguments call the model's dtype."""
        return main_dtype(self.tensors)

    @property
    def step(self) -> int:
        """The number of the source's iteration, 0 if it has none."""
        return self.source.iteration if isinstance(self.source.iteration, int) else 0

    @property
    def optimizer(self) -> Adam | None:
        """What the source's optimizer stores besides states."""
        return self.source.optimizer.adam

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

    @property
    def hub_config(self) -> dict[str, Any]:
        """The config.json of the output, which describes quantized weights if it has some, whatever the base says.

        Raises ReshardError if the source has no config.
        """
        config, quantization = self.config, self.source.quantization
        folder = self.source.description.folder
        if not config:
            raise ReshardError(
                "config-not-beside-checkpoint",
                "config.json not found next to the checkpoint",
                file=str(folder),
                rule="the output must load without any other folder",
                expected="the config.json of the model",
                remedy="pass the Hugging Face folder that training started from: --base DIR",
            )
        if quantization is None:
            config = plain_config(config)
        elif not settings_of(config) and quantization.settings:
            config = {**config, "quantization_config": quantization.settings}
        if self.quantization:
            config = {**config, **settings_as_told(self.quantization)}
        table = self.model.family.config if self.model else None
        with reading_values(folder / CONFIG):
            return portable_config(self._tied_in_all(config), self._computing_dtype, table)

    def _tied_in_all(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """For transformers 4, which asks the config of the language model whether the head is tied and not stored."""
        text = config.get("text_config")
        has_head = any(tensor.name.endswith(HEAD) for tensor in self.tensors)
        if config.get("tie_word_embeddings") is not True or not isinstance(text, dict) or has_head:
            return config
        return {**config, "text_config": {**text, "tie_word_embeddings": True}}

    @property
    def _computing_dtype(self) -> str:
        """The model's dtype in config.json; of a quantized model that of its other weights, in which it computes."""
        quantization = self.source.quantization
        if quantization is None and self.quantization is None:
            return self.main_dtype
        declared = self.config.get("dtype") or self.config.get("torch_dtype")
        scales = quantization.beside if quantization else ()
        others = [each for each in self.tensors if castable(each.dtype) and each.name not in scales]
        return str(declared) if declared else main_dtype(others or self.tensors)

    def name_of(self, plain: str) -> str:
        """The name on the Hub, or in a live model, of the tensor that a plain language model calls `plain`."""
        family = self.model.family if self.model else None
        name = family.hub_name(plain) if family else plain
        return family.live.to_live(name) if family and family.live and self.is_in_memory else name

    @cached_property
    def tied_names(self) -> Mapping[str, str]:
        """The names that a live model has for weights that it has under another name, too, which is the value."""
        live = live_names(self.config, self.model.family.name if self.model else None)
        if live and live.tied and not self.model:
            return live.tied
        return {self.name_of(HEAD): self.name_of(EMBEDDING)} if self.tied else {}

    @property
    def tied(self) -> bool:
        """Whether the model's head is tied to its embedding."""
        return self.model.dims.tied if self.model else bool(self.config.get("tie_word_embeddings"))


def main_dtype(tensors: Sequence[Planned]) -> str:
    """The dtype of most bytes."""
    return of_most_bytes((tensor.dtype, tensor.nbytes) for tensor in tensors).name


def stateless(request: Request) -> list[str]:
    """A note that names the tensors without states, if any: an engine that trains them needs these."""
    if not request.states:
        return []
    apart = (*KEEPS_ITS_DTYPE, *([HEAD] if request.tied else []))
    stateful = {name for states in request.states.values() for name in states}
    names = [tensor.name for tensor in request.tensors if tensor.name not in stateful]
    frozen = sorted(name for name in names if not name.endswith(apart))
    what = f"the optimizer has no states of {listed(frozen, 1)}" if frozen else ""
    return [f"{what}: load them in a run that freezes the same tensors"] if frozen else []


class Writing:
    """A request on its way into files: how a format lays it out, and what users should know of it.

    A format overrides what it has to say. `request` is the one that is written: a format that stores something
    else than it was asked for, such as a tied head, changes it when it begins.
    """

    def __init__(self, request: Request) -> None:
        self.request = request

    @property
    def memory(self) -> MemoryNeed:
        """What computing the files takes, besides the tensors of the request."""
        return NO_NEED

    def files(self) -> list[OutputFile]:
        """The files, below the folder of the output. Raises ReshardError for what the engine cannot store."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """What users should know."""
        return []

    def warnings(self) -> list[Problem]:
        """Where the engine computes something else than the config says."""
        return []

    def load_with(self) -> list[str]:
        """The flags that users type to load the output, in addition to its folder."""
        return []

    def afterwards(self) -> Iterable[OutputCommand]:
        """Commands for the output, each with its purpose."""
        return []


@dataclass(frozen=True)
class Naming:
    """What a format calls tensors.

    `dialects` are the Hub's names, those of a live model, or the dialects of an engine, of which the first that a
    family declares is used. Or the format's own, which `renames` makes of the Hub's for the model of a config; None if
    it does not know that model. `leaves_out` returns the rule by which a tensor has no place, None if it has one.
    """

    dialects: tuple[str, ...] = (HUB,)
    renames: Callable[[Mapping[str, Any]], tuple[Renaming, ...] | None] | None = None
    leaves_out: Callable[[Request, str], str | None] | None = None

    @property
    def are_derived(self) -> bool:
        """Whether they are derived from Hub names, so that an undeclared family can be written."""
        return self.are_of_any_model or self.renames is not None

    @property
    def are_of_any_model(self) -> bool:
        """Whether the format can store a model of which only the Hub's names are known."""
        return self.dialects[0] in (HUB, LIVE)


@dataclass(frozen=True)
class Ranks:
    """Whose ranks the files belong to.

    `axes` are those of the layout that users choose; `data_parallel` says that users pass a number of ranks.
    """

    axes: tuple[str, ...] = ()
    data_parallel: bool = False


@dataclass(frozen=True)
class StoredDtypes:
    """The dtypes that a format stores.

    `only` is that of all weights, if there is only one. `of_tensors` gives each tensor its dtype, by its name and
    shape, from that of most weights. `keeps_scales` says that it can store the scales of a quantized source.
    `quantizes` are the values of `--quantize`.
    """

    only: str | None = None
    of_tensors: Callable[[Request, DType], Callable[[str, tuple[int, ...]], DType]] | None = None
    keeps_scales: bool = False
    quantizes: tuple[str, ...] = ()

    @property
    def listed(self) -> str:
        """The values of `--quantize`; of those with a group size, such as affine-4-32, only the first."""
        sized = [how for how in self.quantizes if how.count("-") > 1]
        return ", ".join(how for how in self.quantizes if how not in sized[1:]) + (" …" if sized else "")


@dataclass(frozen=True)
class Target:
    """What a format can be written as.

    `begin` makes the files of a request. `holds` are the kinds of checkpoints that it can store, `states` the optimizer
    states. `fit` sets model and layout to the engine's sizes before tensors are named, and refuses what it cannot
    store. `check_config` raises ReshardError for a config whose model the format cannot describe, before its family is
    found. `judges_model` says that its engine computes what the entries of families describe.

    `embeds` is the suffix of files that have config and tokenizer inside, and not beside them: one may be the complete
    output, and is not divided unless users ask for it. `beside` is the folder of config and tokenizer, if they are not
    next to the weights. `state_dict` says that it can be the weights alone, with neither of these.
    """

    begin: Callable[[Request], Writing]
    names: Naming = Naming()
    ranks: Ranks = Ranks()
    dtypes: StoredDtypes = StoredDtypes()
    holds: frozenset[CheckpointKind] = frozenset({CheckpointKind.MODEL})
    states: tuple[str, ...] = ()
    embeds: str = ""
    beside: str = ""
    state_dict: bool = False
    judges_model: bool = True
    fit: Callable[[Request], Request] | None = None
    check_config: Callable[[Mapping[str, Any]], None] | None = None


@dataclass(frozen=True)
class Format:
    """One format. `what` describes the files in one line; `target` is None for a read-only format.

    `aliases` are other names that users may type for it; `instead` is what to write instead of a read-only format.
    `parts` are patterns for the names of files of a checkpoint, except weights and config.json.
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
