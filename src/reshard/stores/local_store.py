"""Stores of what is inside a file or folder of this machine: members of an archive, or arrays that are decoded.

A URL of such a store is the scheme, the path on the disk, and the place below it. Nobody types one.
"""

from __future__ import annotations

from pathlib import Path

from reshard.stores.address import Address, normalized_url
from reshard.stores.store import Store


class LocalStore(Store):
    """What is inside one file or folder."""

    @classmethod
    def address(cls, url: str) -> Address:
        scheme, _, rest = url.partition("://")
        return Address(scheme, normalized_url(scheme, rest, cls.kind))

    @classmethod
    def inside(cls, path: Path) -> str:
        """The URL of what is inside a file or folder."""
        return f"{cls.kind.schemes[0]}:/{path.absolute().as_posix()}"


def local_path(url: str) -> Path:
    """The path on the disk that the URL of such a store has behind its scheme."""
    return Path("/", *url.split("/")[2:])
