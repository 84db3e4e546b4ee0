"""The `Range` header of a request, and the parts of an answer to it (RFC 9110, section 14)."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_RANGES = 64
"""Ranges in one request; if there are more, the header is ignored, as it may be."""
_RANGE = re.compile(r"(\d{1,18})-(\d{0,18})|-(\d{1,18})")


class Span(NamedTuple):
    """Bytes `begin` to `end` of a file, without `end` itself."""

    begin: int
    end: int

    def content_range(self, size: int) -> str:
        """The value of `Content-Range`."""
        return f"bytes {self.begin}-{self.end - 1}/{size}"


def spans_of(header: str | None, size: int) -> list[Span] | None:
    """What a `Range` header asks for of a file; empty if none of it exists, None if there is none that can be read."""
    unit, _, ranges = (header or "").partition("=")
    matches = [_RANGE.fullmatch(each.strip()) for each in ranges.split(",")]
    if unit.strip().lower() != "bytes" or len(matches) > MAX_RANGES or None in matches:
        return None
    spans = [_span(match, size) for match in matches if match]
    return [span for span in spans if span.begin < span.end]


def _span(match: re.Match[str], size: int) -> Span:
    first, last, suffix = match.groups()
    if suffix is not None:
        return Span(max(0, size - int(suffix)), size)
    return Span(int(first), min(size, int(last) + 1) if last else size)
