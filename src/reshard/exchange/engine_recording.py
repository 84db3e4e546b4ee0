"""What the weight loaders of one rank of an engine do: where each element of a parameter comes from.

It is recorded once while the engine loads the model (`live/record_loading.py`), for one engine, release, model and
layout, and is data: machines without the engine plan with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from reshard.algebra.dtypes import DType, dtype
from reshard.algebra.views import Piece, View, covered, overlaps
from reshard.base.errors import Problem, ReshardError, raise_all, reading_values
from reshard.base.plain_json import json_of, put

VERSION = 1


@dataclass(frozen=True)
class RecordedParameter:
    """A parameter of an engine. `view` has its elements, in the order of its memory, over names of the Hub.

    Elements without a source are the engine's own, such as rows that it adds to a vocabulary.
    """

    dtype: DType
    view: View

    @property
    def nbytes(self) -> int:
        """Bytes of its elements that have a source."""
        return covered(self.view) * self.dtype.itemsize


@dataclass(frozen=True)
class EngineRecording:
    """The parameters of one rank.

    `loaded` are names of the Hub whose elements a loader computes with before they land somewhere: what it makes of
    them is not known, so the engine's own loader must have them whole.
    """

    engine: str
    rank: int
    ranks: int
    parameters: Mapping[str, RecordedParameter]
    loaded: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the tensors of the Hub that were used."""

    @property
    def nbytes(self) -> int:
        """The least that must arrive at this rank, in bytes."""
        return sum(each.nbytes for each in self.parameters.values())

    def buckets(self, limit: int) -> list[list[str]]:
        """Names of parameters that are sent together: those of whole modules, of at most `limit` bytes if they can."""
        buckets, filled = list[list[str]](), limit + 1
        for _, group in groupby(self.parameters, key=lambda name: name.rpartition(".")[0]):
            names = list(group)
            nbytes = sum(self.parameters[name].nbytes for name in names)
            if filled + nbytes > limit:
                buckets.append([])
                filled = 0
            buckets[-1] += names
            filled += nbytes
        return buckets

    def as_dict(self) -> dict[str, Any]:
        """The recording as JSON: each piece is a name, its first element there and here, and axes of
        (count, step there, step here)."""
        parameters = {
            name: {
                "dtype": each.dtype.name,
                "elements": each.view.numel,
                "pieces": [[piece.source, piece.start, piece.at, piece.axes] for piece in each.view.pieces],
            }
            for name, each in self.parameters.items()
        }
        about = {"version": VERSION, "engine": self.engine, "rank": self.rank, "ranks": self.ranks}
        return {**about, "shapes": self.shapes, "loaded": self.loaded, "parameters": parameters}

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> EngineRecording:
        """The recording that `as_dict` returned. Raises KeyError, TypeError or ValueError."""
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        parameters = {
            name: RecordedParameter(dtype(each["dtype"]), View((each["elements"],), _pieces(each["pieces"])))
            for name, each in content["parameters"].items()
        }
        shapes = {name: tuple(shape) for name, shape in content["shapes"].items()}
        loaded = tuple(content["loaded"])
        rank, ranks = int(content["rank"]), int(content["ranks"])
        return cls(content["engine"], rank, ranks, parameters, loaded, shapes)

    def save(self, folder: Path) -> None:
        """Write it to a file of its rank."""
        folder.mkdir(parents=True, exist_ok=True)
        put(folder / f"rank-{self.rank}.json", self.as_dict())


def read_recordings(folder: Path) -> list[EngineRecording]:
    """The recordings of all ranks in a folder, by rank. Raises ReshardError if one is missing or malformed."""
    recordings = []
    for path in sorted(folder.glob("rank-*.json")):
        with reading_values(path):
            recordings.append(EngineRecording.of_dict(json_of(path.read_bytes())))
        raise_all(_ambiguous(recordings[-1], path))
    recordings.sort(key=lambda each: each.rank)
    ranks = recordings[0].ranks if recordings else 1
    if [each.rank for each in recordings] != list(range(ranks)):
        raise ReshardError(
            "recording-missing",
            "the recording of a rank is missing",
            file=str(folder),
            expected=f"rank-0.json to rank-{ranks - 1}.json",
            found=", ".join(f"rank-{each.rank}.json" for each in recordings) or "none",
            remedy="copy the files of all ranks, or record them again",
        )
    return recordings


def _ambiguous(recording: EngineRecording, path: Path) -> Iterator[Problem]:
    """Parameters of which an element has two sources."""
    for name, parameter in recording.parameters.items():
        if overlaps(parameter.view):
            yield Problem(
                "recording-ambiguous",
                "a recording has two sources for an element of a parameter",
                tensor=name,
                file=str(path),
                rule="each element of a parameter is loaded once",
                remedy="record it again, with the same release of the engine",
            )


def _pieces(listed: Any) -> tuple[Piece, ...]:
    return tuple(Piece(source, start, at, tuple(map(tuple, axes))) for source, start, at, axes in listed)
