"""Names of Megatron's indexed datasets: tokens are in PREFIX.bin, the starts of sequences in PREFIX.idx.

The path of a dataset is here that of its index. The engine reads the contents.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

INDEX, TOKENS = ".idx", ".bin"


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
