"""Files as text, as shells and editors write it: UTF-8, UTF-16 (PowerShell), GBK (Windows in Chinese).

A line may be of any length: minified JSON, base64, progress bars. Only the parts of a long one that can tell of a
failure are kept, so that no line takes more time or memory than another.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO

from reshard.doctor.prefixes import START

LONGEST = 1 << 20
"""Bytes of a line that are read at once."""
LONGEST_LINE = 4_000
"""Characters of a line that are looked at: all, or the first `HEAD` and the last `TAIL`."""
HEAD, TAIL = 2_900, 1_000
INSIDE = 16_000
"""Characters that are looked at from where a traceback begins inside a long line, as it does in JSON."""
CUT = " … "
_NOT_ASCII = bytes(range(128, 256))
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def encoding_of(begin: bytes) -> str | None:
    """UTF-8 or UTF-16, by the first bytes of a file; None if these are no text."""
    if begin[:2] in _MARKS:
        return _MARKS[begin[:2]]
    if b"\0" not in begin:
        return "utf-8"
    for name, high in (("utf-16-le", begin[1::2]), ("utf-16-be", begin[::2])):
        if len(begin) > 1 and high.count(0) > 0.7 * len(high) and b"\0\0" not in begin:
            return name
    return None


def decoded(raw: bytes) -> str:
    """UTF-8, or GB18030 (of which GBK is a part) where it is none; what is neither has marks in place of characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        with suppress(UnicodeDecodeError):
            return raw.decode("gb18030")
    return raw.decode("utf-8", "replace")


def shortened(line: str) -> str:
    """A line without what makes it long: its beginning, the first traceback inside, and its end."""
    if len(line) <= LONGEST_LINE:
        return line
    end = len(line) - TAIL
    at = line.find(START, HEAD - len(START), end)
    inside = [line[at : min(at + INSIDE, end)]] if at >= 0 else []
    return CUT.join([line[:HEAD], *inside, line[end:]])


def clipped(text: str, length: int) -> str:
    """The first `length` characters of a text, with an ellipsis if there are more."""
    return text if len(text) <= length else text[:length].rstrip() + " …"


def lines_of(file: IO[bytes], begin: bytes, on_bytes: Callable[[int], None]) -> Iterator[str]:
    """The lines of a file of which the first bytes were read already. `on_bytes` is told of bytes as they are read."""
    encoding = encoding_of(begin) or "utf-8"
    if encoding == "utf-8":
        yield from _of_utf8(file, begin, on_bytes)
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    rest, chunk = "", begin
    while chunk:
        on_bytes(len(chunk))
        *whole, rest = (rest + decoder.decode(chunk).lstrip("\ufeff")).split("\n")
        yield from whole
        rest, chunk = shortened(rest), file.read(LONGEST)
    if rest:
        yield rest


def _of_utf8(file: IO[bytes], begin: bytes, on_bytes: Callable[[int], None]) -> Iterator[str]:
    on_bytes(len(begin))
    *whole, rest = begin.removeprefix(codecs.BOM_UTF8).split(b"\n")
    yield from map(decoded, whole)
    text = ""
    while raw := file.readline(LONGEST):
        on_bytes(len(raw))
        raw = rest + raw
        if raw.endswith(b"\n"):
            yield text + decoded(raw)
            text, rest = "", b""
        else:
            piece = raw.rstrip(_NOT_ASCII) or raw  # a character is never cut
            text, rest = shortened(text + decoded(piece)), raw[len(piece) :]
    if text or rest:
        yield text + decoded(rest)
