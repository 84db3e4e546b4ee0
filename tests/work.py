"""How much work something is, in units that no other process on the machine changes."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


def calls(function: Callable[[], object]) -> int:
    """The calls of functions, in Python and in C, that a function makes on this thread."""
    counted = 0

    def note(_frame: FrameType, event: str, _what: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return counted


@contextmanager
def reading_at_most(nbytes: int) -> Iterator[None]:
    """Check how many bytes this process reads from files, by Linux's count."""
    before = _bytes_read()
    yield
    assert (read := _bytes_read() - before) <= nbytes, read


def _bytes_read() -> int:
    content = Path("/proc/self/io").read_text()
    return int(content.partition("rchar: ")[2].partition("\n")[0])


def extract_all(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack a tar, by the filter that Python has since 3.11.4."""
    filters: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    archive.extractall(folder, **filters)
