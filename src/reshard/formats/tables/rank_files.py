"""Files of ranks that divide a model by tensor parallelism: which there are, and their tensors joined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from reshard.algebra.tensors import Replica, Tensor
from reshard.algebra.views import concat
from reshard.base.errors import Problem, ReshardError, listed
from reshard.formats.copied_files import has_checksums, ranks_differ
from reshard.formats.sharding import CollectedShards, Split, TensorShards

COPY_AGAIN = "copy the files of all ranks again from where they were saved"


def files_of_ranks(folder: Path, name: re.Pattern[str], count: int | None = None) -> list[Path]:
    """The files in a folder whose names match, in the order of the rank, which is the first group of `name`.

    Without a `count` of ranks, the last file tells it. Raises ReshardError naming the ranks that are missing.
    """
    found = {int(match[1]): child for child in folder.iterdir() if (match := name.fullmatch(child.name))}
    ranks = count or 1 + max(found, default=-1)
    missing = sorted(set(range(ranks)) - found.keys())
    if missing:
        raise ReshardError(
            "rank-file-missing",
            "the files of some ranks are missing",
            file=str(folder),
            rule="each rank has a part of the model, and all are read",
            expected=f"{ranks} files",
            found=f"none of rank {listed([str(rank) for rank in missing], 8)}",
            remedy=COPY_AGAIN,
        )
    return [found[rank] for rank in range(ranks)]


@dataclass
class JoinedRanks:
    """The tensors of all ranks: joined as `split_of` says that they are cut, or as each rank has them.

    `replicas` are those that several ranks have. Shapes do not show that a file is a copy of another rank's: `problems`
    has the copies that recorded checksums show, and of files without these, `replicas` has what must differ.
    """

    contents: Sequence[Mapping[str, Tensor]]
    split_of: Callable[[str], Split | None]
    replicas: list[Replica] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def tensors(self) -> dict[str, Tensor]:
        """The complete tensors, by name. Raises ReshardError listing those whose parts do not fit together."""
        found = CollectedShards()
        for rank, content in enumerate(self.contents):
            for name, part in content.items():
                split = self.split_of(name)
                found.add(name, name, part, split, rank, len(self.contents))
                if split is None:
                    found.compare(name, part, (name, 0))
        self.replicas += found.replicas
        self.problems += found.copies.problems()
        if misfits := found.misfits(_misfits):
            raise ReshardError(self.problems or misfits)
        self.replicas += self._told_apart()
        return found.joined()

    def _told_apart(self) -> Iterator[Replica]:
        """Comparisons of each two ranks by all matrices of one dtype that are cut and have no checksums."""
        cut = {
            name: part
            for name, part in self.contents[0].items()
            if self.split_of(name) and len(part.shape) > 1 and not has_checksums(part)
        }
        first = next(iter(cut), None)
        if first is None:
            return
        names = [name for name, part in cut.items() if part.dtype == cut[first].dtype]
        ranks = [_in_a_row([content[name] for name in names]) for content in self.contents]
        for one, other in combinations(ranks, 2):
            yield ranks_differ(first, one, other)


def _in_a_row(parts: Sequence[Tensor]) -> Tensor:
    return Tensor(parts[0].dtype, concat([part.view.reshape(part.view.numel) for part in parts]))


def _misfits(name: str, shards: TensorShards, split: Split) -> Iterator[Problem]:
    """A problem if a part is missing, or parts are not alike."""
    kinds = {(part.dtype.name, part.shape) for part in shards.by_rank.values()}
    whole = all(len(shape) > split.axis for _, shape in kinds) and len(kinds) == 1
    missing = shards.missing_ranks()
    if whole and not missing:
        return
    yield Problem(
        "rank-parts-misfit",
        "the parts of a tensor on all ranks do not fit together",
        tensor=name,
        file=next(iter(shards.by_rank.values())).file,
        rule=f"{shards.ranks} ranks have equal parts of it",
        found=_kinds(kinds) + (f"; none of rank {listed(list(map(str, missing)), 8)}" if missing else ""),
        remedy=COPY_AGAIN,
    )


def _kinds(kinds: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(kinds))
