"""Detect a file that is not its rank's: a copy of another rank's, or one of another run.

It loads without an error, and yields a wrong model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Cells, Replica, Tensor, cells_of
from reshard.base.errors import Problem
from reshard.stores import open_file

ANOTHER_RUN = "a rank's file belongs to another run or iteration"
ONE_RUN = "the files of all ranks belong to one iteration of one run"

_COPIED = "the file of one rank is a copy of another rank's"
_DIFFERING = "the shards of two ranks differ"
_COPY_AGAIN = "one of the two is in the wrong place: copy each rank's file again from where it was saved"

EDGE_BYTES = 1 << 16
"""Bytes compared at both ends of two files: the last ones contain the checksums of a whole archive."""

File = TypeVar("File", str, Path)


class CopyFinder:
    """Compares files by their recorded checksums, without reading tensors. Safetensors files record none."""

    def __init__(self) -> None:
        self._checksums: dict[str, list[int]] = defaultdict(list)
        self._places: dict[str, list[tuple[Hashable, ...]]] = defaultdict(list)

    def add(self, file: str, tensor: str, place: tuple[Hashable, ...], stored: StoredTensor) -> None:
        """Note that `file` contains the shard `tensor`, which by the layout is at `place`.

        Two files with the same shards at the same places are replicas. Vectors (norms, biases) may well be equal, and
        are not counted.
        """
        if stored.storage.crc32 is not None and sum(size > 1 for size in stored.shape) > 1:
            self._checksums[file].append(stored.storage.crc32)
            self._places[file].append((tensor, *place))

    def problems(self) -> list[Problem]:
        """A problem for every file whose shards equal those of another file, although its places differ.

        Names do not count: in a copy from another pipeline stage, the embedding may appear as the head.
        """
        shards = {file: tuple(sorted(found)) for file, found in sorted(self._checksums.items())}
        return [
            copy_problem(
                file, f"the same {len(shards[file])} shards as in {first}", str(self._places[file][0][0])
            )
            for file, first in copied(shards)
            if set(self._places[first]) != set(self._places[file])
        ]


def copied(contents: Mapping[File, Hashable]) -> Iterator[tuple[File, File]]:
    """Each file with the content of an earlier one, and the first such file."""
    seen: dict[Hashable, File] = {}
    for file, content in contents.items():
        first = seen.setdefault(content, file)
        if first != file:
            yield file, first


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements, by the checksums that were recorded; false if there are none."""
    return _marks(one) == _marks(other)


def has_checksums(tensor: Tensor) -> bool:
    """Whether the files of a tensor record checksums of all that it reads."""
    return all(cells.storage.crc32 is not None for cells in cells_of(tensor.view))


def _marks(tensor: Tensor) -> list[tuple[object, ...]] | object:
    """What identifies the elements of a tensor: place, size and CRC32 of each chunk."""
    marks: list[tuple[object, ...]] = []
    for piece in tensor.view.pieces:
        if not isinstance(piece.source, Cells) or piece.source.storage.crc32 is None:
            return object()  # unequal to everything
        storage, dtype = piece.source
        marks.append((piece.at, piece.start, piece.axes, dtype, storage.nbytes, storage.crc32))
    return sorted(marks, key=str)


def explained(problems: Sequence[Problem], files: Iterable[Path]) -> Sequence[Problem]:
    """`problems`, or their cause: one of `files` that they name is a copy of another.

    Reads only the ends of files, which is enough if the sizes are equal.
    """
    broken = tuple(problem.file or "" for problem in problems)
    ends: dict[Path, tuple[int, bytes, bytes]] = {}
    for path in filter(Path.is_file, sorted(files)):
        with open_file(path) as file:
            size = file.size
            ends[path] = size, file.read(0, EDGE_BYTES), file.read(max(0, size - EDGE_BYTES), EDGE_BYTES)
    copies = [
        copy_problem(str(path), f"the same {ends[path][0]} bytes as in {first}")
        for path, first in copied(ends)
        if any(file.startswith((str(first), str(path))) for file in broken)
    ]
    return copies or problems


def copy_problem(file: str, found: str, tensor: str | None = None) -> Problem:
    """The problem of `file`, which contains the same as another file; `found` says what and where."""
    return Problem(
        "rank-file-copied",
        _COPIED,
        tensor=tensor,
        file=file,
        rule=_DIFFERING,
        expected="the shards of this rank",
        found=found,
        remedy=_COPY_AGAIN,
    )


def ranks_differ(tensor: str, first: Tensor, second: Tensor) -> Replica:
    """The comparison of what two ranks' files contain, beginning with their shards of `tensor`."""
    return Replica(tensor, first, second, _DIFFERING, _COPY_AGAIN, "rank-file-copied", _COPIED, equal=False)


def of_other_runs(
    problem: Problem, runs: Mapping[File, tuple[str, ...]], shown: Callable[[File], str] = str
) -> Iterator[Problem]:
    """`problem` for each file whose run differs from that of most; a run is the facts that a file records about it."""
    counts = Counter(runs.values())
    usual = max(counts, key=counts.__getitem__, default=())
    for file, run in runs.items():
        if run != usual:
            example = next(other for other in runs if runs[other] == usual)
            differing = [(fact, own) for fact, own in zip(usual, run, strict=True) if fact != own]
            yield replace(
                problem,
                file=str(file),
                expected=f"{', '.join(fact for fact, _ in differing)}, as in {shown(example)}",
                found=", ".join(own for _, own in differing),
            )
