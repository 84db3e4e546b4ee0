"""The open files of one thread, kept open between reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from reshard.base.errors import ReshardError
from reshard.stores import OpenFile, open_file


class OpenFiles:
    """Open files of one thread, least recently used first."""

    def __init__(self, limit: int = 128, opener: Callable[[str], OpenFile] = open_file) -> None:
        self.opened: OrderedDict[str, OpenFile] = OrderedDict()
        """The files that are open, by path."""
        self._limit, self._opener = limit, opener
        self.read_bytes = 0
        """Bytes that were read."""

    def file(self, path: str) -> OpenFile:
        file = self.opened.get(path)
        if file is not None:
            self.opened.move_to_end(path)
            return file
        while len(self.opened) >= self._limit:
            self.opened.popitem(last=False)[1].close()
        opened = self.opened[path] = self._opener(path)
        return opened

    def read(self, path: str, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each buffer of `parts` with the bytes of `path` from its offset.

        Raises ReshardError if the file ends too early, or if it cannot be read.
        """
        try:
            file = self.file(path)
            parts = list(parts)
            end = file.fill(parts)
            self.read_bytes += sum(len(part) for _, part in parts)
            length = None if end is None else f"{file.size} bytes"
        except OSError as error:
            raise unreadable(path, error) from error
        if end is not None:
            raise ReshardError(
                "file-ends-early",
                "a file is shorter than expected",
                file=path,
                expected=f"at least {end} bytes",
                found=length,
                remedy="the file changed or was cut short while it was read: copy it again",
            )

    def close(self) -> None:
        while self.opened:
            self.opened.popitem()[1].close()


def unreadable(path: str, error: OSError) -> ReshardError:
    """The error for a file that the system does not let be read, now."""
    return ReshardError(
        "file-unreadable",
        "a file cannot be read",
        file=path,
        found=error.strerror or str(error),
        remedy="check the disk or file server, then run the same command again",
    )
