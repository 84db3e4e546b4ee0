"""Detect a rank's file that is a copy of another rank's: it loads without an error, and yields a wrong model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from reshard.algebra.storage import StoredTensor
from reshard.base.errors import Problem
from reshard.stores import open_file

EDGE = 1 << 16
"""Bytes compared at both ends of two files: the last ones contain the checksums of a whole archive."""


class CopyFinder:
    """Compares files by their recorded checksums, without reading tensors."""

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
        seen: dict[tuple[int, ...], str] = {}
        problems = []
        for file in sorted(self._checksums):
            shards = sorted(self._checksums[file])
            first = seen.setdefault(tuple(shards), file)
            if first != file and set(self._places[first]) != set(self._places[file]):
                tensor = str(self._places[file][0][0])
                problems.append(copy_problem(file, f"the same {len(shards)} shards as in {first}", tensor))
        return problems


def explained(problems: Sequence[Problem], files: Iterable[Path]) -> Sequence[Problem]:
    """`problems`, or their cause: one of `files` that they name is a copy of another.

    Reads only the ends of files, which is enough if the sizes are equal.
    """
    broken = tuple(problem.file or "" for problem in problems)
    seen: dict[tuple[int, bytes, bytes], Path] = {}
    copies = []
    for path in filter(Path.is_file, sorted(files)):
        with open_file(path) as file:
            size = file.size
            ends = file.read(0, EDGE), file.read(max(0, size - EDGE), EDGE)
        first = seen.setdefault((size, *ends), path)
        if first != path and any(file.startswith((str(first), str(path))) for file in broken):
            copies.append(copy_problem(str(path), f"the same {size} bytes as in {first}"))
    return copies or problems


def copy_problem(file: str, found: str, tensor: str | None = None) -> Problem:
    """The problem of `file`, which contains the same as another file; `found` says what and where."""
    return Problem(
        "rank-file-copied",
        "the file of one rank is a copy of another rank's",
        tensor=tensor,
        file=file,
        rule="the shards of two ranks differ",
        expected="the shards of this rank",
        found=found,
        remedy="one of the two is in the wrong place: copy each rank's file again from where it was saved",
    )
