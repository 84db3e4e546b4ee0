"""The memory of ranks in numpy: what a plan would do to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from reshard.algebra.views import Piece
from reshard.exchange.engine_recording import EngineRecording
from reshard.exchange.transfer_plan import Transfer

Array = np.ndarray[Any, Any]
Memory = dict[str, Array]
"""The parameters of a rank, each flat."""


def _places(array: Array, first: int, steps: Iterable[tuple[int, int]]) -> Array:
    counted = list(steps)
    strides = [step * array.itemsize for _, step in counted]
    return as_strided(array[first:], [count for count, _ in counted], strides)


def _move(piece: Piece, source: Array, target: Array) -> None:
    elements = _places(source, piece.start, [(count, step) for count, step, _ in piece.axes])
    _places(target, piece.at, [(count, step) for count, _, step in piece.axes])[...] = elements


def empty(recording: EngineRecording) -> Memory:
    """Parameters of NaN."""
    return {name: np.full(each.view.numel, np.nan, np.float32) for name, each in recording.parameters.items()}


def loaded(recording: EngineRecording, hub: Mapping[str, Array]) -> Memory:
    """What the engine's loaders make of the tensors of the Hub."""
    memory = empty(recording)
    for name, parameter in recording.parameters.items():
        for piece in parameter.view.pieces:
            _move(piece, np.ascontiguousarray(hub[str(piece.source)]).reshape(-1), memory[name])
    return memory


def received(
    recording: EngineRecording,
    transfers: Iterable[Transfer],
    held: Mapping[int, Mapping[tuple[str, str], Array]],
) -> Memory:
    """What a rank has received; `held` has the tensors of each sender. Nothing arrives twice."""
    memory = empty(recording)
    for each in transfers:
        if each.receiver == recording.rank:
            target = memory[each.parameter]
            places = _places(target, each.piece.at, [(count, step) for count, _, step in each.piece.axes])
            assert np.isnan(places).all()
            _move(each.piece, held[each.sender][each.tensor], target)
    return memory
