"""The files of one save, by rank, and what their names say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.formats.detection import fsdp_saves

_WORLD = re.compile(r".*world_size_(\d+)")
COPY_ALL = "copy the files of all ranks from all nodes into one folder"


class RankFiles(NamedTuple):
    """The files of one save, by rank; `world` is the number of ranks according to their names."""

    save: str
    ranks: dict[int, Path]
    world: int | None

    @property
    def folder(self) -> Path:
        return next(iter(self.ranks.values())).parent


def choose(path: Path) -> RankFiles:
    """The one save at `path`, which may also be the file of one of its ranks."""
    by_save = fsdp_saves(path if path.is_dir() else path.parent)
    if path.is_file():
        by_save = {save: ranks for save, ranks in by_save.items() if path in ranks.values()}
    if len(by_save) > 1:
        raise ReshardError(
            "fsdp-several-saves",
            "there are several saves in one folder",
            file=str(path),
            rule="the names of the files of one save differ only in the rank",
            found=", ".join(f"{save or 'rank'} ({len(ranks)} ranks)" for save, ranks in by_save.items()),
            remedy="pass one of the files, or move those of the other save elsewhere",
        )
    ((save, ranks),) = by_save.items()
    match = _WORLD.fullmatch(save)
    return RankFiles(save, ranks, int(match[1]) if match else None)


def check_names(files: RankFiles) -> None:
    """Raise ReshardError if files of ranks are missing, or if there are more than the names allow."""
    world = files.world or max(files.ranks) + 1
    pattern = next(iter(files.ranks.values())).name
    problems = [
        missing_rank(files, rank, f"names count ranks from 0 to {world - 1}, as in {pattern}")
        for rank in range(world)
        if rank not in files.ranks
    ]
    problems += [
        Problem(
            "file-of-unknown-rank",
            "a file belongs to a rank that this save does not have",
            file=str(files.ranks[rank]),
            rule=f"its name says that there are {world} ranks",
            remedy="it was renamed or belongs to another run: move it elsewhere",
        )
        for rank in files.ranks
        if rank >= world
    ]
    raise_all(problems)


def missing_rank(files: RankFiles, rank: int, rule: str) -> Problem:
    first, path = next(iter(files.ranks.items()))
    name = re.sub(rf"(rank[_-]?){first}(?=\.)", rf"\g<1>{rank}", path.name)
    return Problem(
        "fsdp-rank-missing",
        "the file of a rank is missing",
        file=str(path.with_name(name)),
        rule=rule,
        expected=f"the file of rank {rank}",
        remedy=COPY_ALL,
    )
