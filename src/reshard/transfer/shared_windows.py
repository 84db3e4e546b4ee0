"""Windows of files in stores that several ranks need parts of: each is fetched once, by whoever needs it first.

The ranks of a row-parallel weight need some columns each, so all of them need the same bytes. Their files are written
side by side, so a few windows are enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Event, Lock
from typing import NamedTuple

from reshard.algebra.storage import Storage
from reshard.stores import MAX_REQUEST_BYTES
from reshard.transfer.thread_files import OpenFiles


class _WindowKey(NamedTuple):
    """Window `number` of a storage, counted from its beginning."""

    storage: Storage
    number: int


class _FetchedWindow:
    """The bytes of a window, once they are `there`; None if they could not be fetched."""

    def __init__(self) -> None:
        self.there = Event()
        self.content: memoryview | None = None


class Windows:
    """The last windows that were read, `limit` bytes of them, for all threads of a run."""

    def __init__(self, limit: int) -> None:
        self._most = max(1, limit // MAX_REQUEST_BYTES)
        self._kept: OrderedDict[_WindowKey, _FetchedWindow] = OrderedDict()
        self._lock = Lock()

    def read(self, files: OpenFiles, storage: Storage, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes of a storage from its offset. Raises ReshardError."""
        for at, out in parts:
            done = 0
            while done < len(out):
                number, first = divmod(at + done, MAX_REQUEST_BYTES)
                content = self._content(files, _WindowKey(storage, number))
                count = min(len(out) - done, len(content) - first)
                out[done : done + count] = content[first : first + count]
                done += count

    def _content(self, files: OpenFiles, key: _WindowKey) -> memoryview:
        while True:
            with self._lock:
                window = self._kept.get(key)
                is_first = window is None
                if window is None:
                    window = self._kept[key] = _FetchedWindow()
                    while len(self._kept) > self._most:
                        self._kept.popitem(last=False)
                self._kept.move_to_end(key)
            if is_first:
                self._fetch(files, key, window)
            window.there.wait()
            if window.content is not None:
                return window.content

    def _fetch(self, files: OpenFiles, key: _WindowKey, window: _FetchedWindow) -> None:
        """Fetch a window. If that fails, whoever waits for it tries again, and gets the error."""
        begin = key.number * MAX_REQUEST_BYTES
        content = memoryview(bytearray(min(MAX_REQUEST_BYTES, key.storage.nbytes - begin)))
        try:
            files.read(key.storage.path, [(key.storage.offset + begin, content)])
            window.content = content
        finally:
            if window.content is None:
                with self._lock:
                    self._kept.pop(key, None)
            window.there.set()
