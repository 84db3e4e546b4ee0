"""An opened checkpoint: which tensors it has and where their bytes are. No tensor has been read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.algebra.layout import SavedLayout
from reshard.algebra.tensors import Replica, Tensor
from reshard.base.errors import Problem
from reshard.base.quantities import count, size
from reshard.families.dialect import HUB, Dialect
from reshard.folders.base_hints import BaseHint, find_hints
from reshard.folders.companions import Companions, find_companions
from reshard.folders.iterations import Iteration
from reshard.formats.optimizer import OptimizerContents
from reshard.formats.quantization import Quantization
from reshard.transfer.source_files import Sources


@dataclass(frozen=True)
class ModelDescription:
    """What the files of a checkpoint say of its model, and where its companions are.

    `folder` is that of the config and the tokenizer; a tokenizer in `tokenizers`, folders of an adapter or of a
    Megatron-Bridge iteration, takes precedence. `config` is the content of a config.json as far as another engine's
    config determines it; `recorded` are the keys of it that files state, if others are assumed, or such keys alone, if
    they determine no config. `changes` is where the config of a merged model differs from the one in `folder`. `args`
    are Megatron-LM's arguments.
    """

    folder: Path
    tokenizers: tuple[Path, ...] = ()
    config: Mapping[str, Any] | None = None
    recorded: Mapping[str, Any] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders with config and tokenizer files, in order of precedence."""
        return (*self.tokenizers, self.folder)

    @property
    def stated(self) -> Mapping[str, Any]:
        """The keys of `config` that the files state, empty if they state none."""
        return (self.config if self.recorded is None else self.recorded) or {}


@dataclass(frozen=True)
class FormatData:
    """What only the reader of a format knows; one that its own target needs has a class of its own.

    Without shapes, tensors have one axis until `model.resolve` reshapes them. If it `is_part`, the format keeps only
    the language model of a larger model. If it `needs_its_ranks`, a run resumes only on as many ranks as saved the
    files.
    """

    has_shapes: bool = True
    is_part: bool = False

    @property
    def needs_its_ranks(self) -> bool:
        return False


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """An opened checkpoint, as its format's reader found it.

    Attributes
    ----------
    path : Path
        Where it was found.
    format : str
        Name of the format.
    dialect : Dialect
        Whose names the tensors have: the Hub's, or an engine's (`Family.dialects`).
    tensors : dict of str to Tensor
        All weights.
    description : ModelDescription
        What its files say of its model, and where config and tokenizer are.
    layout : SavedLayout
        The recorded layout.
    iteration : int or "release", optional
        Step of a training run.
    optimizer : OptimizerContents
        The states of its optimizer, with step and settings.
    dropped : Counter
        Bytes that are not model weights, by rule ("random number states" …). States count as "optimizer states".
    replicas : list of Replica
        Tensors that are stored more than once.
    problems : list of Problem
        What was wrong with its metadata.
    notes : list of str
        What users should know.
    variant : str
        Which variant of the format it is, if there are several.
    quantization : Quantization, optional
        Which tensors are quantized weights.
    filled : tuple of str
        Tensors that it lacked, and another model completed.
    spare : frozenset of str
        Tensors that are dropped if the family does not have them and they are zeros.
    native : FormatData
        What only its format knows.
    sources : Sources
        What opened its files, and opens those beside it.
    """

    path: Path
    format: str
    dialect: Dialect
    tensors: dict[str, Tensor]
    description: ModelDescription
    layout: SavedLayout = field(default_factory=SavedLayout)
    iteration: Iteration | None = None
    optimizer: OptimizerContents = field(default_factory=OptimizerContents)
    dropped: Counter[str] = field(default_factory=Counter)
    replicas: list[Replica] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    variant: str = ""
    quantization: Quantization | None = None
    filled: tuple[str, ...] = ()
    spare: frozenset[str] = frozenset()
    native: FormatData = field(default_factory=FormatData)
    sources: Sources = field(default_factory=Sources, compare=False)

    def __repr__(self) -> str:
        """One line: listing the tensors of a large model would take megabytes."""
        return f"<{type(self).__name__} {self.format} {str(self.path)!r}: {self.amount}>"

    @property
    def has_hub_names(self) -> bool:
        """Whether its tensors are named as on the Hub."""
        return self.dialect == HUB

    @property
    def has_megatron_names(self) -> bool:
        """Whether its tensors are named as in Megatron-Core."""
        return bool(self.dialect.engine)

    @property
    def amount(self) -> str:
        """Parameters, tensors and bytes in one line of text."""
        tensors = len(self.tensors)
        named = "1 tensor" if tensors == 1 else f"{tensors:,} tensors"
        return f"{count(self.parameters)} parameters in {named}, {size(self.nbytes)}"

    @property
    def described_layout(self) -> str:
        """The recorded layout as text, with the sizes that are not recorded. Empty for names such as Hugging Face's,
        which are not sharded over ranks.
        """
        if not self.dialect.sharded:
            return ""
        recorded, unrecorded = str(self.layout), self.layout.unrecorded
        if not recorded:
            return "not recorded"
        return f"{recorded} ({', '.join(unrecorded)} not recorded)" if unrecorded else recorded

    def companions(self, *first: Path) -> Companions:
        """The files of config and tokenizer, of which those in the folders `first` take precedence."""
        return find_companions(self.sources, *first, *self.description.folders)

    def hints(self) -> list[BaseHint]:
        """Where its files say that the model comes from."""
        return find_hints([self.path, self.description.folder], self.sources, self.description.args)

    @property
    def parameters(self) -> int:
        """Number of elements of all weights. For quantized weights, packed elements are counted and scales are not."""
        if self.quantization:
            return self.quantization.parameters(self.tensors)
        return sum(tensor.elements for tensor in self.tensors.values())

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the weight `name`, or None if there is none or its quantized shape is unknown."""
        weight = self.quantization.weights.get(name) if self.quantization else None
        if weight:
            return weight.shape(self.tensors[weight.values])
        return self.tensors[name].shape if name in self.tensors else None

    @property
    def nbytes(self) -> int:
        """Size of all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Number of tensors by dtype."""
        return dict(Counter(tensor.dtype.name for tensor in self.tensors.values()))
