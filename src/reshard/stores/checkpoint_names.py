"""Names of the files of checkpoints, as formats declare them to stores: no store knows a format.

A web server may have no listings, and is then asked for the files that it could have. A repository of the Hub may hold
the same weights several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Named = Callable[[Any], Iterable[str]]
"""A function from the content of a JSON file to the names in it. It may raise for another content."""


@dataclass(frozen=True)
class FileNames:
    """Names of files.

    `usual` are names in the folder of a checkpoint. `naming` are those of JSON files that name others beside them, each
    with the function that finds these. `weights` are suffixes of weights, `other` are patterns of the same weights for
    other programs, and `twice` are patterns of the same weights under other names.
    """

    usual: tuple[str, ...] = ()
    naming: Mapping[str, Named] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()


_declarations: list[Callable[[], FileNames]] = []


def declare(names: Callable[[], FileNames]) -> None:
    """Set the function that is called whenever names are needed."""
    _declarations[:] = [names]


def declared() -> FileNames:
    """The names that formats have declared, which they do when `reshard.formats` is imported."""
    assert _declarations, "import reshard.formats before paths in stores are read"
    return _declarations[0]()
