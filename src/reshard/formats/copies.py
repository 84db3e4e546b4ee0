"""Notice a rank's file that is a copy of another rank's: it loads everywhere, and yields a wrong model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from reshard.errors import Problem
from reshard.storage import StoredTensor


class CopyFinder:
    """Compares files by the checksums that they record, so no tensor is read."""

    def __init__(self) -> None:
        self._files: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._places: dict[str, list[tuple[Hashable, ...]]] = defaultdict(list)

    def add(self, file: str, tensor: str, place: tuple[Hashable, ...], stored: StoredTensor) -> None:
        """Note that `file` calls a shard `tensor`, and that by the layout it is the one at `place`.

        Two files with the same shards at the same places are replicas. Vectors (norms, biases) may well be
        equal, and are not counted.
        """
        if stored.storage.crc32 is not None and sum(size > 1 for size in stored.shape) > 1:
            self._files[file].append((tensor, stored.storage.crc32))
            self._places[file].append((tensor, *place))

    def problems(self) -> list[Problem]:
        """Every file whose shards equal those of another file, and should be others."""
        seen: dict[tuple[tuple[str, int], ...], str] = {}
        problems = []
        for file in sorted(self._files):
            first = seen.setdefault(tuple(sorted(self._files[file])), file)
            if first != file and set(self._places[first]) != set(self._places[file]):
                problems.append(
                    Problem(
                        "the file of one rank is a copy of another rank's",
                        tensor=self._files[file][0][0],
                        file=file,
                        rule="the shards of two ranks differ",
                        expected="the shards of this rank",
                        found=f"the same {len(self._files[file])} shards as in {first}",
                        remedy="copy this rank's own file from where it was saved",
                    )
                )
        return problems
