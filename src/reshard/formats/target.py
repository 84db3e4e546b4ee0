"""The contract of a format: what it is called, how it is read, and what it can be written as.

A plan makes a `Request`, the same for all formats, of a checkpoint and of what the user asked for. The `Target` of a
format says what it can hold, and lays the request out in files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from reshard.algebra.layout import Layout
from reshard.errors import listed
from reshard.families.model import Model
from reshard.formats.checkpoint import Checkpoint, Iteration, Optimizer
from reshard.transfer.plan import OutputFile, Planned

HUB, LIVE = "hf", "live"
"""The names of the hub, and those in the memory of transformers; all others are dialects, which families declare."""

HEAD = "lm_head.weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTERS = "fp32"

KEEPS_ITS_DTYPE = ("e_score_correction_bias", "expert_bias")
"""Router biases are fp32 whatever the model is: transformers and Megatron-Core both keep them so."""


class Kind(Enum):
    """What a checkpoint holds: a model, a LoRA adapter, or one of Megatron-Core, whose linears are fused."""

    MODEL = "model"
    ADAPTER = "adapter"
    FUSED_ADAPTER = "adapter of fused linears"


@dataclass(frozen=True)
class Options:
    """How the output should look: the flags of `reshard convert`, and files to copy into it, by their name there."""

    to: str | None = None
    base: Path | None = None
    layout: Layout = field(default_factory=Layout)
    iteration: Iteration | None = None
    family: str | None = None
    engine: str | None = None
    trust: str = "checkpoint"
    dtype: str | None = None
    quantize: str | None = None
    max_shard_size: int = 5_000_000_000
    vocab_divisible_by: int | None = None
    transformer_impl: str | None = None
    tokenizer: bool = True
    strip: tuple[str, ...] = ()
    merge: bool = False
    adapter: str | None = None
    lora_alpha: float | None = None
    with_optimizer: bool = False
    beside: Mapping[str, Path] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """What is not as by default, for a record; of the files beside it only the names."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        told = {name: value for name, value in found.items() if value != getattr(Options(), name)}
        plain: dict[str, Any] = {"base": str, "layout": asdict, "beside": sorted}
        return {name: plain[name](value) if name in plain else value for name, value in told.items()}

    @staticmethod
    def of_dict(told: Mapping[str, Any]) -> Options:
        """The options of a record, without files beside it. Raises TypeError or ValueError if it has others."""
        found = {name: value for name, value in told.items() if name != "beside"}
        if "base" in found:
            found["base"] = Path(found["base"])
        if "layout" in found:
            layout: dict[str, Any] = {**found["layout"], "stages": tuple(found["layout"]["stages"])}
            found["layout"] = Layout(**layout)
        if "strip" in found:
            found["strip"] = tuple(found["strip"])
        return Options(**found)


PlannedStates = Mapping[str, Mapping[str, Planned]]
"""For each optimizer state the planned tensors, by the name of the tensor that it belongs to."""


@dataclass(frozen=True)
class Request:
    """What a format lays out. `tensors` are whole, under the names of `dialect`; `states` are those of the optimizer.

    `model` is at the sizes of the output, None for a family that nobody declared; `config` is its Hugging Face config.
    `iteration` and `optimizer` are those of the source. `adapter` are the settings of an adapter, None for a model.
    `quantization` are those of weights that the plan quantizes. `engine` is the one that saved a source of Megatron's.
    """

    options: Options
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

    @cached_property
    def main_dtype(self) -> str:
        """The dtype of most elements: what config.json and Megatron-LM's arguments call the model's dtype."""
        return main_dtype(self.tensors)

    @property
    def declared(self) -> Model:
        """The model, for a target whose names a family has to declare."""
        assert self.model is not None
        return self.model

    def called(self, plain: str) -> str:
        """What the hub, or a live model, calls a tensor that a language model by itself calls so."""
        family = self.model.family if self.model else None
        name = family.hub_name(plain) if family else plain
        return family.live.to_live(name) if family and family.live and self.dialect == LIVE else name

    @property
    def tied(self) -> bool:
        """Whether the head of the model is its embedding."""
        return self.model.dims.tied if self.model else bool(self.config.get("tie_word_embeddings"))


def main_dtype(tensors: Sequence[Planned]) -> str:
    """The dtype of most elements."""
    counted: Counter[str] = Counter()
    for tensor in tensors:
        counted[tensor.dtype.name] += tensor.nbytes
    return counted.most_common(1)[0][0]


def stateless(request: Request) -> list[str]:
    """A note that names the tensors without states, if there are any: an engine that trains them will miss these."""
    if not request.states:
        return []
    apart = (*KEEPS_ITS_DTYPE, *([HEAD] if request.tied else []))
    stateful = request.states[MOMENTS[0]]
    names = [tensor.name for tensor in request.tensors if tensor.name not in stateful]
    frozen = sorted(name for name in names if not name.endswith(apart))
    what = f"the optimizer has no states of {listed(frozen, 1)}" if frozen else ""
    return [f"{what}: load them in a run that freezes the same tensors"] if frozen else []


def as_asked(request: Request) -> Request:
    """The request as it is."""
    return request


def nothing(request: Request) -> list[str]:
    """Nothing to say."""
    return []


@dataclass(frozen=True)
class Target:
    """What a format can be written as.

    `lay_out` makes the files of a request. `names` are those of the hub, of a live model, or the dialects of an engine,
    of which a family's first counts. `sharded` says that ranks share the files, so that a layout can be asked for.
    `states` are the optimizer states that it keeps; `dtype` is the only one of its weights, if there is only one;
    `quantized` says that it has a place for scales.
    `fit` gives model and layout the sizes that the engine would, before tensors are named, and refuses what the engine
    cannot hold. `complete` adds what the engine stores otherwise, after. `notes` and `load_with` are what to tell and
    to type, beyond the folder.
    """

    lay_out: Callable[[Request], list[OutputFile]]
    names: tuple[str, ...] = (HUB,)
    holds: frozenset[Kind] = frozenset({Kind.MODEL})
    sharded: bool = False
    states: tuple[str, ...] = ()
    dtype: str | None = None
    quantized: bool = False
    fit: Callable[[Request], Request] = as_asked
    complete: Callable[[Request], Request] = as_asked
    notes: Callable[[Request], list[str]] = nothing
    load_with: Callable[[Request], list[str]] = nothing

    @property
    def keeps_names(self) -> bool:
        """Whether its names follow from those of the hub, so that a family which nobody declared can be written."""
        return self.names[0] in (HUB, LIVE)


@dataclass(frozen=True)
class Format:
    """One format. `what` tells in a line what lies on disk; `target` is None for a format that is only read.

    `aliases` are other names that users may type for it; `instead` is what to write in place of one that is only read.
    `detect` tells by the names of files whether a path holds it; it is quick and does not raise. `open` reads headers
    and metadata only, takes the iteration that is asked for, or None, and raises ReshardError.
    """

    name: str
    what: str
    detect: Callable[[Path], bool]
    open: Callable[[Path, Iteration | None], Checkpoint]
    target: Target | None = None
    aliases: tuple[str, ...] = ()
    instead: str = ""

    @property
    def all_names(self) -> tuple[str, ...]:
        """Every name that stands for it."""
        return (self.name, *self.aliases)
