"""Answers to requests for a range of bytes, checked before their bytes are used.

A status 206 alone proves nothing: caches and proxies have answered with another range, and a file that is replaced
between two requests would be read as a mixture of both. RFC 9110, section 14, defines the headers.
"""

from __future__ import annotations

import re
import time
from typing import NamedTuple

from reshard.base.errors import ReshardError
from reshard.stores.file_info import FileInfo

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")

DOWNLOAD_INSTEAD = "download the files with another program, and pass the local path"
"""The remedy if a server cannot be read in ranges."""

TIMEOUT_SECONDS = 60
"""Seconds without data after which a request fails."""

MIN_BYTES_PER_SECOND = 4 << 10
"""Least bytes per second, on average, of an answer that takes longer than that."""


class RangeRequest(NamedTuple):
    """Bytes `begin` to `end` of a file. The file may end before if its state is not `known` yet."""

    url: str
    begin: int
    end: int
    known: FileInfo | None = None

    def size_in(self, content_range: str | None) -> int:
        """The size of the file, from the `Content-Range` of a 206. Raises ReshardError if it names other bytes."""
        match = _CONTENT_RANGE.fullmatch((content_range or "").strip())
        begin, last, size = map(int, match.groups()) if match else (-1, -1, -1)
        if match and self.known and size != self.known.size:
            raise self.changed(self.known._replace(size=size))
        if begin != self.begin or last + 1 != min(self.end, size):
            raise self._other(content_range)
        return size

    def check_state(self, answered: FileInfo) -> None:
        """Raise ReshardError if an answer is of another version of the file: by its ETag, or else its time."""
        if self.known is None:
            return
        is_same = (
            answered.identity == self.known.identity
            if answered.identity or self.known.identity
            else answered.modified == self.known.modified
        )
        if not is_same:
            raise self.changed(answered)

    def check_coding(self, coding: str | None) -> None:
        """Raise ReshardError if a server compressed its answer, although it was asked not to."""
        if (coding or "identity").strip().lower() != "identity":
            raise ReshardError(
                "answer-compressed",
                "the server sends compressed data",
                file=self.url,
                rule="offsets in compressed data are not those of the file",
                expected="an answer without Content-Encoding",
                found=f"Content-Encoding: {coding}",
                remedy=f"switch compression off for this folder on the server or proxy; or {DOWNLOAD_INSTEAD}",
            )

    def check_length(self, size: int, received: int, *, is_end: bool = True) -> None:
        """Raise ReshardError for more bytes than wanted; for fewer at the end OSError, after which retries may help."""
        count = min(self.end, size) - self.begin
        if received > count:
            raise ReshardError(
                "answer-too-long",
                "the server sends more bytes than were requested",
                file=self.url,
                expected=f"{count:,} bytes from byte {self.begin:,}",
                found=f"at least {received:,} bytes",
                remedy=DOWNLOAD_INSTEAD,
            )
        if is_end and received < count:
            raise ConnectionError(f"{received:,} of {count:,} bytes received from byte {self.begin:,}")

    def changed(self, answered: FileInfo | None) -> ReshardError:
        """The error for an answer about another version of the file."""
        return ReshardError(
            "source-changed",
            "a source changed while it was read",
            file=self.url,
            rule="the source must not change during the run",
            expected=str(self.known.stamp()) if self.known else None,
            found=str(answered.stamp()) if answered else "it is shorter",
            remedy="wait until nothing writes to the source any more, then run the same command again",
        )

    def _other(self, content_range: str | None) -> ReshardError:
        size = self.known.size if self.known else "SIZE"
        return ReshardError(
            "range-answer-wrong",
            "the server did not answer with the requested range of bytes",
            file=self.url,
            expected=f"Content-Range: bytes {self.begin}-{self.end - 1}/{size}",
            found=f"Content-Range: {content_range[:100]}" if content_range else "no Content-Range",
            remedy=f"report it to whoever runs the server or proxy; {DOWNLOAD_INSTEAD}",
        )


class ResponseBody:
    """The content of an answer as it arrives, limited in size and time. `size` is that of the file."""

    def __init__(self, wanted: RangeRequest, size: int) -> None:
        self._wanted, self._size = wanted, size
        self._received = bytearray()
        self._begun = time.monotonic()

    def __len__(self) -> int:
        return len(self._received)

    def add(self, part: bytes) -> None:
        """Add what arrived. Raises ReshardError if it is too much, or comes too slowly."""
        self._received += part
        self._wanted.check_length(self._size, len(self), is_end=False)
        took = time.monotonic() - self._begun
        if took > TIMEOUT_SECONDS and len(self) < took * MIN_BYTES_PER_SECOND:
            raise ReshardError(
                "server-too-slow",
                "the server sends too slowly",
                file=self._wanted.url,
                expected=f"at least {MIN_BYTES_PER_SECOND:,} bytes per second",
                found=f"{len(self):,} bytes in {took:.0f} seconds",
                remedy=f"check the network and the server, then run the same command again; or {DOWNLOAD_INSTEAD}",
            )

    def content(self) -> bytes:
        """The complete content. Raises OSError, after which another try may help, if bytes are missing."""
        self._wanted.check_length(self._size, len(self))
        return bytes(self._received)

    def text(self) -> str:
        """The content of a page, of which any part may be missing."""
        return self._received.decode("utf-8", "replace")
