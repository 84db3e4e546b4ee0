"""What a pickle asks for, looked at before it is loaded: memory for more than it holds is refused.

The unpickler of the standard library believes the numbers in a pickle. A place in its memo (LONG_BINPUT, PUT) makes the
memo that long, and a count of bytes (BYTEARRAY8) makes a buffer of that size, before anything of it was read. Ten bytes
could ask for gigabytes.
"""

from __future__ import annotations

import pickletools
import re
from collections import defaultdict
from functools import lru_cache

_LINES, _PAIR = -1, "stringnl_noescape_pair"
_COUNTS = {-2: 1, -3: 4, -4: 4, -5: 8}
"""Bytes of a count, by how `pickletools` says that an argument begins with one."""

_PUT, _LONG_PUT, _STOP = b"p", b"r", b"."
_BLOCK = 1 << 16
_AT_ONCE = 1000
"""Opcodes that one match passes: the engine of regular expressions remembers each."""


def _grammar() -> tuple[list[bytes], dict[bytes, int]]:
    """Patterns of opcodes that ask for no more than they are; those that count bytes, with the width of the count."""
    fixed: dict[int, list[bytes]] = defaultdict(list)
    lines, counted = [], {}
    for opcode in pickletools.opcodes:
        code, argument = opcode.code.encode("latin1"), opcode.arg
        size = argument.n if argument else 0
        if code in (_PUT, _LONG_PUT, _STOP):
            continue
        if size >= 0:
            fixed[size].append(re.escape(code))
        elif argument and size == _LINES:
            lines.append(re.escape(code) + rb"[^\n]*\n" * (2 if argument.name == _PAIR else 1))
        else:
            counted[code] = _COUNTS[size]
    return [*(b"[" + b"".join(codes) + b"]" + b"." * size for size, codes in fixed.items()), *lines], counted


_PATTERNS, _COUNTED = _grammar()


@lru_cache
def _plain(blocks: int) -> re.Pattern[bytes]:
    """Opcodes that ask for nothing beyond a pickle of so many blocks, and less than one more."""
    near = rb"..[\0-%b]\0" if blocks < 256 else rb"...[\0-%b]"
    put = _LONG_PUT + near % re.escape(bytes([blocks if blocks < 256 else blocks >> 8]))
    return re.compile(b"(?:" + b"|".join([*_PATTERNS, put]) + b"){0,%d}" % _AT_ONCE, re.DOTALL)


def check(data: bytes) -> None:
    """Raise ValueError if the pickle `data` counts more bytes, or numbers more objects, than it can hold.

    Where it ends early or has an unknown opcode, the unpickler says so.
    """
    plain, at = _plain(len(data) // _BLOCK), 0
    while True:
        begin, at = at, plain.match(data, at).end()  # type: ignore[union-attr]
        code = data[at : at + 1]
        if width := _COUNTED.get(code):
            count = int.from_bytes(data[at + 1 : at + 1 + width], "little")
            at += 1 + width + count
            if at > len(data):
                raise ValueError(f"it counts {count} bytes where there are fewer")
        elif code == _PUT and (end := data.find(b"\n", at)) > 0:
            if int(data[at + 1 : end]) > len(data):
                raise ValueError("it numbers more objects than it can hold")
            at = end + 1
        elif at == begin:
            if code == _LONG_PUT and at + 5 <= len(data):
                raise ValueError("it numbers more objects than it can hold")
            return
