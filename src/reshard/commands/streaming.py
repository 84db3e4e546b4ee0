"""All tensors of a checkpoint, or some, one after another, read ahead by several threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from reshard.algebra.tensors import Tensor, cells_of
from reshard.base.errors import ReshardError
from reshard.commands.lazy import Array, Index, LazyTensor
from reshard.commands.weights import Weights
from reshard.transfer.compare import unequal_replicas
from reshard.transfer.gather import check_sums
from reshard.transfer.ledger import Ledger
from reshard.transfer.memory_budget import MemoryMeter, shared
from reshard.transfer.plan import Planned
from reshard.transfer.prefetch import WantedTensor, read_ahead

FILE, MODEL = "file", "model"
ORDERS = (FILE, MODEL)
"""The orders in which tensors can be read: as they lie in the files, or as the model has them."""

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_STACKED = re.compile(r"\.experts\.[a-z_]+$")


@dataclass(frozen=True)
class Selection:
    """Which tensors to read, and which part of each.

    `names` are those to read; by default all. `boxes` has, for some of them, the index of the part to read, as for a
    numpy array. Of routed experts, only those with the numbers in `experts` are read; of stacked experts, these rows.
    """

    names: Collection[str] | None = None
    boxes: Mapping[str, Index] | None = None
    experts: range | None = None

    def of(self, weights: Weights) -> list[LazyTensor]:
        """The tensors, in the order of the model. Raises TensorNotFoundError for an unknown name."""
        requested = {*(self.names or ()), *(self.boxes or ())}
        for unknown in sorted(requested - weights.keys()):
            weights[unknown]  # raises
        chosen = [weights[name] for name in weights if self.names is None or name in requested]
        self._check_experts(weights)
        return [self._part(each) for each in chosen if self._has(each)]

    def _check_experts(self, weights: Weights) -> None:
        """Raise ReshardError if an expert is asked for that a model with experts does not have."""
        if self.experts is None:
            return
        counts = [int(match[1]) + 1 for match in map(_EXPERT.search, weights) if match]
        stacked = [each.shape[0] for each in weights.plan.planned if _is_stacked(each)]
        count = max([*counts, *stacked], default=0)
        if count and self.experts.stop > count:
            raise ReshardError(
                "stream-experts-beyond",
                "the model has fewer experts",
                file=str(weights.checkpoint.path),
                expected=f"numbers below {count}",
                found=f"experts={self.experts!r}",
                remedy="pass a range within them",
            )

    def _has(self, tensor: LazyTensor) -> bool:
        match = _EXPERT.search(tensor.name)
        return self.experts is None or match is None or int(match[1]) in self.experts

    def _part(self, tensor: LazyTensor) -> LazyTensor:
        if self.experts is not None and _is_stacked(tensor):
            tensor = tensor[self.experts.start : self.experts.stop]
        if not self.boxes or tensor.name not in self.boxes:
            return tensor
        try:
            return tensor[self.boxes[tensor.name]]
        except IndexError as error:
            raise ReshardError(
                "tensor-index-beyond",
                "a tensor does not have the part that was asked for",
                tensor=tensor.name,
                expected=f"an index of the shape {list(tensor.shape)}",
                found=str(error),
                remedy="correct its entry in `boxes`",
            ) from None


def _is_stacked(tensor: LazyTensor | Planned) -> bool:
    """Whether a tensor has the experts of a layer as its first axis: weights, and biases, which have an axis less."""
    return bool(_STACKED.search(tensor.name)) and len(tensor.shape) > 1


@dataclass(frozen=True)
class ReadOptions:
    """How to read: the limit of memory in bytes, the number of threads, and whether to compare what is there twice.

    `verify` compares all CRC32s that the files record, and tensors that are stored more than once.
    """

    memory: int
    workers: int | None
    verify: bool


def streamed(
    weights: Weights, selection: Selection, order: str, how: ReadOptions
) -> Iterator[tuple[LazyTensor, Array]]:
    """Each selected tensor with its raw elements. Raises ReshardError, at the latest when all are read."""
    chosen = selection.of(weights)
    if order == FILE:
        chosen.sort(key=lambda each: place(each.tensor))
    wanted = [WantedTensor(each.name, each.tensor) for each in chosen]
    for each, (_, raw) in zip(chosen, read(weights, wanted, how), strict=True):
        yield each, raw


def read(
    weights: Weights,
    wanted: Sequence[WantedTensor],
    how: ReadOptions,
    on_read: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[tuple[str, Array]]:
    """The raw elements of some tensors of a checkpoint, in this order.

    `on_read` receives the number of bytes that were read for them.

    Raises ReshardError for what cannot be read, for damage, and at the end for files that have changed meanwhile.
    """
    meter, plan = MemoryMeter(how.memory), weights.plan
    names = {cells.storage: each.name for each in wanted for cells in cells_of(each.tensor.view)}
    files = {storage.path for storage in names if storage.path}
    left = meter.left(plan.need)
    share = shared(how.workers, left // 2, plan.need, files)
    waiting_bytes = max(0, left - share.threads * share.each)
    ledger = Ledger(every=True, most=share.ranges) if how.verify else None
    sources = weights.checkpoint.sources if how.verify else weights.checkpoint.sources.only(files)
    with weights.reading(), sources.unchanged(ledger.passed if ledger else None):
        if how.verify and (problems := unequal_replicas(plan.replicas, share)):
            raise ReshardError(problems)
        yield from read_ahead(wanted, share, ledger, waiting_bytes, on_read)
        if ledger:
            check_sums(ledger, names)


def place(tensor: Tensor) -> tuple[str, float]:
    """Where the first bytes of a tensor are; in the last place if no file has any."""
    first = next((cells.storage for cells in cells_of(tensor.view) if cells.storage.path), None)
    return (first.path, first.offset) if first else ("\U0010ffff", inf)
