"""The `Range` header of a request (RFC 9110, section 14). A range is a `range` of the places of its bytes."""

from __future__ import annotations

import re

MAX_RANGES = 64
"""Ranges in one request; if there are more, the header is ignored, as it may be."""
_RANGE = re.compile(r"(\d{1,18})-(\d{0,18})|-(\d{1,18})")


def ranges_of(header: str, size: int) -> list[range] | None:
    """What a header asks for of a file; empty if none of it exists, None if the header is empty or malformed."""
    unit, _, ranges = header.partition("=")
    matches = [_RANGE.fullmatch(each.strip()) for each in ranges.split(",")]
    if unit.strip().lower() != "bytes" or len(matches) > MAX_RANGES or None in matches:
        return None
    return list(filter(None, (_range(match, size) for match in matches if match)))


def _range(match: re.Match[str], size: int) -> range:
    first, last, suffix = match.groups()
    if suffix is not None:
        return range(max(0, size - int(suffix)), size)
    return range(int(first), min(size, int(last) + 1) if last else size)
