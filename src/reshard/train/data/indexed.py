"""Megatron's own indexed datasets, by their names: tokens in PREFIX.bin, and where sequences begin in PREFIX.idx.

Here the path of a dataset is that of its index. What is in it, the engine reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

INDEX, TOKENS = ".idx", ".bin"


def index_of(path: Path) -> Path | None:
    """The index of a dataset that is named by its prefix, as Megatron does, or by a file of it; None without one."""
    prefix = prefix_of(path) if path.suffix in (INDEX, TOKENS) else path
    index = prefix.with_name(prefix.name + INDEX)
    return index if index.is_file() else None


def prefix_of(index: Path) -> Path:
    """The prefix of a dataset, by the path of one of its files."""
    return index.with_suffix("")


def are_indexed(paths: Iterable[Path]) -> bool:
    """Whether there is an indexed dataset among paths."""
    return any(path.suffix == INDEX for path in paths)
