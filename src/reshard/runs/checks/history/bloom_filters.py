"""Which packages may have a name, without reading their tables: a Bloom filter for each, made with the tables."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path

FILTER_FILE = "having.json.xz"
BITS_PER_NAME = 9
"""Bits for each name in a filter: of names that a package does not have, one in a hundred is said to be there."""
_PLACES = 6


def packages_with(packages: Iterable[str], *names: str) -> list[str]:
    """The packages that may have all of these names; the others have not.

    A name is that of a class, a function (`Class.method`, and `Class` for `Class.__init__`) or an export of the
    package's root; `.name` is an attribute of any class, and `module:name` an import that a release dropped.
    """
    filters = _filters()
    return [
        package
        for package in packages
        if package in filters and all(_is_in(filters[package], name) for name in names)
    ]


def places(name: str, size: int) -> Iterator[int]:
    """The bits of a name in a filter with this number of bytes."""
    whole = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "big")
    first, step = whole >> 64, whole & (1 << 64) - 1
    return ((first + each * step) % (size * 8) for each in range(_PLACES))


def _is_in(bits: bytes, name: str) -> bool:
    return all(bits[at >> 3] >> (at & 7) & 1 for at in places(name, len(bits)))


@cache
def _filters() -> dict[str, bytes]:
    path = Path(__file__).with_name("tables") / FILTER_FILE
    return {
        package: bytes.fromhex(text)
        for package, text in json.loads(lzma.decompress(path.read_bytes())).items()
    }
