"""Record where an engine's weight loaders put each element, while they load a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from reshard.algebra.dtypes import dtype
from reshard.algebra.views import Piece, View
from reshard.exchange.engine_recording import EngineRecording, RecordedParameter
from reshard.live.deferred_tensors import DeferredTensor, ReadTally


@dataclass(frozen=True)
class _Landing:
    """Elements of the Hub's tensors, the memory that they were copied to, and the sum of what is there then."""

    elements: View
    target: torch.Tensor
    digest: torch.Tensor

    @property
    def memory(self) -> int:
        """The address of the memory."""
        return int(self.target.untyped_storage().data_ptr())

    @property
    def is_computed(self) -> bool:
        """Whether a loader has computed with the elements in their place."""
        return not torch.equal(_digest(self.target), self.digest)


@dataclass
class Landings(ReadTally):
    """A tally that also keeps where the elements of deferred tensors went."""

    places: dict[tuple[object, ...], _Landing] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)

    def landed(self, target: torch.Tensor, source: DeferredTensor) -> None:
        """Keep a copy; one that repeats elements is no bijection, so it counts as computed."""
        if target.shape != source.shape or target.is_meta:
            self.computed(source)
            return
        place = (target.data_ptr(), target.shape, target.stride())
        landing = _Landing(source.elements, target.detach(), _digest(target))
        with self._lock:
            self.places[place] = landing  # in place of what was written there before

    def computed(self, source: DeferredTensor) -> None:
        """Keep that a tensor was read for something else than a copy."""
        with self._lock:
            self.loaded.add(source.lazy.name)

    def recording(
        self,
        model: torch.nn.Module,
        engine: str,
        shapes: Mapping[str, tuple[int, ...]],
        rank: int = 0,
        ranks: int = 1,
    ) -> EngineRecording:
        """What was recorded, once a model is loaded. `shapes` are those of the tensors that were used."""
        by_memory: dict[int, list[_Landing]] = {}
        for landing in self.places.values():
            by_memory.setdefault(landing.memory, []).append(landing)
        parameters = {}
        for name, parameter in model.named_parameters():
            landings = by_memory.pop(parameter.untyped_storage().data_ptr(), None)
            if not landings:
                continue
            if parameter.is_contiguous() and not any(each.is_computed for each in landings):
                kind = dtype(str(parameter.dtype).removeprefix("torch."))
                parameters[name] = RecordedParameter(kind, _view(parameter, landings))
            else:
                by_memory[parameter.untyped_storage().data_ptr()] = landings
        elsewhere = {str(each) for each in _sources(by_memory)}  # to what a loader computed with afterwards
        return EngineRecording(
            engine, rank, ranks, parameters, tuple(sorted(self.loaded | elsewhere)), dict(shapes)
        )


def _view(parameter: torch.Tensor, landings: list[_Landing]) -> View:
    """A parameter over the tensors of the Hub. What was written twice has the last source."""
    pieces: dict[tuple[int, tuple[tuple[int, int], ...]], Piece] = {}
    begin = parameter.storage_offset()
    for each in landings:
        target = each.target
        placed = each.elements.in_memory(parameter.numel(), target.stride(), target.storage_offset() - begin)
        for piece in placed.pieces:
            pieces[piece.at, tuple((count, step) for count, _, step in piece.axes)] = piece
    return View((parameter.numel(),), tuple(pieces.values()))


def _digest(target: torch.Tensor) -> torch.Tensor:
    """The sum of the bits of the elements, which stays on their device."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.itemsize]
    return target.detach().view(bits).sum(dtype=torch.int64)


def _sources(by_memory: Mapping[int, list[_Landing]]) -> Iterator[object]:
    return (
        piece.source for places in by_memory.values() for each in places for piece in each.elements.pieces
    )
