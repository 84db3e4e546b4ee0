"""What a disk or a store says about a file, without its content."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import NamedTuple


class Stamp(NamedTuple):
    """What distinguishes states of a file, as far as the system records it.

    `modified` is in nanoseconds, 0 if unknown. `identity` is the inode of a local file; in a store it is the
    version, ETag or commit. `changed` is the time of the last change of a local file's content or attributes, in
    nanoseconds: unlike `modified`, no program can set it, but a new name or owner changes it, too.
    """

    size: int
    modified: int
    identity: int | str
    changed: int = 0

    def as_dict(self) -> dict[str, int | str]:
        """The entry of a file in a record of what was read."""
        modified = datetime.fromtimestamp(self.modified / 1e9, timezone.utc).isoformat()
        known: dict[str, int | str] = {"modified": modified} if self.modified else {}
        version = {"version": self.identity} if isinstance(self.identity, str) and self.identity else {}
        return {"bytes": self.size, **known, **version}

    def __str__(self) -> str:
        modified = datetime.fromtimestamp(self.modified / 1e9).isoformat(" ", "milliseconds")
        known = f", modified {modified}" if self.modified else ""
        name = "inode" if isinstance(self.identity, int) else "version"
        return f"{self.size:,} bytes{known}" + (f", {name} {self.identity}" if self.identity else "")


class FileInfo(NamedTuple):
    """A file or folder as a store reports it; `modified` is in nanoseconds, 0 if unknown."""

    size: int = 0
    modified: int = 0
    identity: str = ""
    """The version, ETag or commit: it changes with the bytes."""
    is_folder: bool = False

    def stamp(self) -> Stamp:
        """The state of the file."""
        return Stamp(self.size, self.modified, self.identity)


ANY_FOLDER = FileInfo(is_folder=True)
