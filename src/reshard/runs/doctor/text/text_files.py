"""Reads files as text in the encodings of shells and editors: UTF-8, UTF-16 (PowerShell), GBK (Windows in Chinese).

A line may have any length: minified JSON, base64, progress bars. Only the parts of a long one that may report a failure
are kept, so that no line takes more time or memory than another.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from typing import IO

from reshard.base.plain_json import decoded
from reshard.runs.doctor.text.line_prefixes import TRACEBACK_START

CHUNK_BYTES = 1 << 20
"""Bytes that are read at once."""
MAX_LINE = 4_000
"""Maximum characters of a line that are searched: of a longer line, the first `HEAD` and the last `TAIL`."""
HEAD, TAIL = 2_900, 1_000
MAX_INNER_TRACEBACK = 16_000
"""Characters that are searched from the beginning of a traceback inside a long line, as in JSON."""
ELLIPSIS = " … "
PROBED_BYTES = 4096
"""Bytes that show what a file is."""
_NOT_ASCII = bytes(range(128, 256))
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def encoding_of(begin: bytes) -> str | None:
    """UTF-8 or UTF-16, by the first bytes of a file; None if these are not text."""
    if begin[:2] in _MARKS:
        return _MARKS[begin[:2]]
    if b"\0" not in begin:
        return "utf-8"
    for name, high in (("utf-16-le", begin[1::2]), ("utf-16-be", begin[::2])):
        if len(begin) > 1 and high.count(0) > 0.7 * len(high) and b"\0\0" not in begin:
            return name
    return None


def shortened(line: str) -> str:
    """The relevant parts of a long line: its beginning, the first traceback inside, and its end."""
    if len(line) <= MAX_LINE:
        return line
    end = len(line) - TAIL
    at = line.find(TRACEBACK_START, HEAD - len(TRACEBACK_START), end)
    inside = [line[at : min(at + MAX_INNER_TRACEBACK, end)]] if at >= 0 else []
    return ELLIPSIS.join([line[:HEAD], *inside, line[end:]])


def lines_of(
    file: IO[bytes],
    begin: bytes,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_lines: Callable[[int], None] = lambda count: None,
) -> Iterator[str]:
    """The lines of a file whose first bytes have already been read.

    `on_bytes` receives how many bytes were read, `on_lines` how many lines, some thousands at a time.
    """
    encoding = encoding_of(begin) or "utf-8"
    chunks = _chunks(file, begin, on_bytes)
    rest = ""
    for text in _of_utf8(chunks) if encoding == "utf-8" else _of_utf16(chunks, encoding):
        *lines, rest = (rest + text).split("\n")
        on_lines(len(lines))
        yield from lines
        rest = shortened(rest)
    if rest:
        on_lines(1)
        yield rest


def _chunks(file: IO[bytes], begin: bytes, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    chunk = begin
    while chunk:
        on_bytes(len(chunk))
        yield chunk
        chunk = file.read(CHUNK_BYTES)


def _of_utf16(chunks: Iterable[bytes], encoding: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    return (decoder.decode(chunk).lstrip("\ufeff") for chunk in chunks)


def _of_utf8(chunks: Iterable[bytes]) -> Iterator[str]:
    """Text of complete lines, if there are any, decoded together: decoding line by line takes ten times as long."""
    rest, mark = b"", codecs.BOM_UTF8
    for chunk in chunks:
        raw = rest + chunk.removeprefix(mark)
        # a line is decoded as a whole, because of its encoding; a longer one is not cut inside a character
        end = raw.rfind(b"\n") + 1 or len(raw.rstrip(_NOT_ASCII)) or len(raw)
        whole, rest, mark = raw[:end], raw[end:], b""
        try:
            yield whole.decode()
        except UnicodeDecodeError:
            yield "\n".join(map(decoded, whole.split(b"\n")))
    if rest:
        yield decoded(rest)
