"""The data of a run: files and folders, each with its share, and how often an epoch uses each record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.base.errors import Problem, ReshardError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

INDEX, TOKENS = ".idx", ".bin"
"""Files of Megatron's indexed datasets: the starts of sequences, and tokens. A dataset's path is that of its index."""


@dataclass(frozen=True)
class DataSource:
    """A file or folder of data. `weight` is its share of an epoch relative to the other sources; None if not given."""

    path: Path
    weight: float | None = None

    def __str__(self) -> str:
        """As on the command line after --data. A file's name may end like a weight."""
        if self.weight is not None:
            return f"{self.path}:{self.weight:g}"
        return str(self.path)


@dataclass(frozen=True)
class DataMix:
    """The sources of a run. Either all have a weight or none has.

    Without weights, an epoch uses each record once. With weights, it is just long enough to use every record: records
    of sources that are too small for their share are used several times.
    """

    sources: tuple[DataSource, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.sources))

    @property
    def paths(self) -> list[Path]:
        """The paths of the data."""
        return [source.path for source in self.sources]

    @property
    def words(self) -> list[str]:
        """The arguments of each --data."""
        return [str(source) for source in self.sources]

    def exists(self) -> bool:
        """Whether all sources exist."""
        return all(path.exists() for path in self.paths)

    def seen(self, sizes: Sequence[int]) -> list[int]:
        """Records of each source that an epoch uses, given the size of each source; none of an empty source."""
        if len(self.sources) < 2 or self.sources[0].weight is None:
            return list(sizes)
        weights = [source.weight or 0.0 for source in self.sources]
        lengths = [size / weight for size, weight in zip(sizes, weights, strict=True)]
        unit = max(lengths, default=0.0)
        return [
            max(size, round(weight * unit)) if size else 0
            for size, weight in zip(sizes, weights, strict=True)
        ]

    def picks(self, sizes: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """The indices of an epoch's records, counted through all sources in order; None if it uses each record once.

        A source is repeated completely as often as it fits into its share. The records that fill the rest are drawn at
        random, with the same seed in every epoch and every run.
        """
        import numpy as np

        seen = self.seen(sizes)
        if seen == list(sizes):
            return None
        parts, first = [], 0
        for number, (size, count) in enumerate(zip(sizes, seen, strict=True)):
            times, rest = divmod(count, size) if size else (0, 0)
            drawn = np.sort(np.random.default_rng([number, size]).permutation(size)[:rest])
            parts += [first + np.tile(np.arange(size), times), first + drawn]
            first += size
        return np.concatenate(parts).astype(np.int64)

    def recorded(self) -> str | list[dict[str, Any]]:
        """For `run.json`: a path, or several sources with their weights."""
        if len(self.sources) == 1 and self.sources[0].weight is None:
            return str(self.sources[0].path)
        return [{"path": str(source.path), "weight": source.weight} for source in self.sources]


def mix_of(given: Any) -> DataMix:
    """A mix from its `recorded` form, from a path, or from a mix."""
    if isinstance(given, DataMix):
        return given
    if isinstance(given, (str, Path)):
        return DataMix((DataSource(Path(given)),))
    return DataMix(tuple(DataSource(Path(each["path"]), each["weight"]) for each in given))


def absolute(word: str) -> Path:
    """The absolute path of an argument; for the prefix of a Megatron dataset, the path of its index."""
    path = Path(word).expanduser().absolute()
    return path if path.is_dir() else index_of(path) or path


def index_of(path: Path) -> Path | None:
    """The index of a dataset given by its prefix, as in Megatron, or by one of its files; None if it does not exist."""
    prefix = prefix_of(path) if path.suffix in (INDEX, TOKENS) else path
    index = prefix.with_name(prefix.name + INDEX)
    return index if index.is_file() else None


def prefix_of(index: Path) -> Path:
    """The prefix of a dataset, by the path of one of its files."""
    return index.with_suffix("")


def are_indexed(paths: Iterable[Path]) -> bool:
    """Whether any of the paths is an indexed dataset."""
    return any(path.suffix == INDEX for path in paths)


def read_mix(option: str, words: Any, local: Callable[[str], Path] = absolute) -> DataMix:
    """The mix given as `PATH` or `PATH:WEIGHT`, or as a list of those. Raises ReshardError.

    A colon belongs to the path if that path exists, or if no number follows it. `local` returns the path of an argument
    without its weight, which may be a name.
    """
    if isinstance(words, DataMix):
        return words
    listed = words if isinstance(words, (list, tuple)) else [words]
    problems = [_no_path(option, each) for each in listed if not isinstance(each, (str, Path))]
    if problems or not listed:
        raise ReshardError(problems or [_no_path(option, words)])
    mix = DataMix(tuple(_source(str(each), local) for each in listed))
    wrong = [*_wrong_weights(option, mix), *_twice(option, mix)]
    if wrong:
        raise ReshardError(wrong)
    return mix


def _source(word: str, local: Callable[[str], Path]) -> DataSource:
    given: float | None = None
    path, colon, weight = word.rpartition(":")
    if colon and path and not absolute(word).exists():
        with suppress(ValueError):
            given, word = float(weight), path
    return DataSource(local(word), given)


def _no_path(option: str, found: Any) -> Problem:
    return Problem(
        "option-not-a-path",
        f"{option} is not a path",
        found=repr(found),
        remedy=f"pass files or folders, each with {option}; in a config, as one path or a list of paths",
    )


def _wrong_weights(option: str, mix: DataMix) -> Iterator[Problem]:
    for source in mix.sources:
        if source.weight is not None and not 0 < source.weight < math.inf:
            yield Problem(
                "data-weight-not-positive",
                "a weight of data must be greater than 0",
                found=f"{option} {source}",
                expected="a positive number, as in a.jsonl:0.7",
                remedy="correct the weight, or leave the source out",
            )
    without = [str(source) for source in mix.sources if source.weight is None]
    if 0 < len(without) < len(mix.sources):
        yield Problem(
            "data-weight-missing",
            "some of the data have a weight, and some have none",
            found=f"no weight: {', '.join(without)}",
            expected="a weight for each source, or for none",
            remedy=f"write {option} {without[0]}:1, or leave out all weights to see each record once in an epoch",
        )


def _twice(option: str, mix: DataMix) -> Iterator[Problem]:
    for path in dict.fromkeys(mix.paths):
        if (count := mix.paths.count(path)) > 1:
            yield Problem(
                "data-given-twice",
                "the same data are passed twice",
                file=str(path),
                found=f"{count} times with {option}",
                remedy="pass them once, with a higher weight to see them more often",
            )
