"""An opened checkpoint: which tensors it has and where their bytes are. No tensor has been read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.algebra.layout import SavedLayout
from reshard.algebra.tensors import Replica, Tensor
from reshard.base.errors import Problem, count, size
from reshard.families.dialect import HUB, MEGATRON, Dialect
from reshard.folders.iterations import Iteration
from reshard.formats.optimizer import OptimizerContents
from reshard.formats.quantization import Quantization
from reshard.transfer.source_files import Sources


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
    root : Path
        Folder with the config.
    layout : SavedLayout
        The recorded layout.
    iteration : int or "release", optional
        Step of a training run.
    args : mapping, optional
        Megatron-LM's arguments.
    engine : str
        Engine whose Megatron names the tensors have.
    config : mapping, optional
        Content of a config.json, as far as another engine's config determines it.
    recorded : mapping, optional
        The keys of `config` that its files state, if others are assumed; or such keys alone, if they do not determine a
        config. By default, all of `config`.
    changes : mapping
        For a merged model: where its config differs from the one in `root`.
    beside : tuple of Path
        Folders whose tokenizer takes precedence over the one in `root`: that of an adapter, or of a Megatron-Bridge
        iteration.
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
    flat : bool
        Whether the format stores no shapes. Tensors then have one axis until `model.resolve` reshapes them.
    quantization : Quantization, optional
        Which tensors are quantized weights.
    is_part : bool
        Whether its format keeps only the language model of a larger model.
    spare : frozenset of str
        Tensors that are dropped if the family does not have them and they are zeros.
    native : object
        What only its format knows, for a target of the same format.
    sources : Sources
        What opened its files, and opens those beside it.
    """

    path: Path
    format: str
    dialect: Dialect
    tensors: dict[str, Tensor]
    root: Path
    layout: SavedLayout = field(default_factory=SavedLayout)
    iteration: Iteration | None = None
    args: Mapping[str, Any] | None = None
    engine: str = "mcore"
    config: Mapping[str, Any] | None = None
    recorded: Mapping[str, Any] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[Path, ...] = ()
    optimizer: OptimizerContents = field(default_factory=OptimizerContents)
    dropped: Counter[str] = field(default_factory=Counter)
    replicas: list[Replica] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    variant: str = ""
    flat: bool = False
    quantization: Quantization | None = None
    is_part: bool = False
    spare: frozenset[str] = frozenset()
    native: Any = None
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
        return self.dialect == MEGATRON

    @property
    def rules(self) -> str:
        """The dialect whose rules say which tensors it must have. Hub names fit those of any engine."""
        return self.engine if self.has_hub_names or self.has_megatron_names else self.dialect.name

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

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders with config and tokenizer files, in order of precedence."""
        return (*self.beside, self.root)

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
