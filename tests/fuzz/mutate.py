"""Nearly valid inputs: genuine ones with a value replaced, in the grammar of their parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Mutator = Callable[[bytes, Random], bytes]

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        2**31,
        2**63,
        -(2**63),
        10**30,
        10**400,
        0.5,
        -0.0,
        1e308,
        1e400,
        -1e400,
    ),
    *(
        "",
        " ",
        "a",
        "0",
        "-1",
        "1e9",
        "true",
        "null",
        "nan",
        "..",
        "../x",
        "/",
        "/etc/passwd",
        "\0",
        "x" * 300,
    ),
    *("\ud800", "\u202e", "\x1b[2J", "²", "١", "*", "[", "{}", "%s", "__class__", "torch.float32", "float32"),
    *([], {}, [[]], [0], ["a"], [None], {"a": 1}, [1, 2, 3], [[1, 2], [3]], {"": ""}, [-1], [0, 0], [10**20]),
)
"""Values of any type to put in place of another."""

_CHUNKS = (
    b"",
    b"\0",
    b"\xff",
    b"\xff\xff\xff\x7f",
    b"\0" * 8,
    b"9" * 25,
    b"-",
    b"\n",
    b"\r\n",
    b"\t",
    b"\x80",
)


def of_bytes(data: bytes, random: Random) -> bytes:
    """Replace, remove or duplicate some bytes."""
    content = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        at, length = random.randint(0, len(content)), random.choice((0, 1, 1, 2, 8, 64))
        new = random.choice((*_CHUNKS, bytes([random.randrange(256)]), _piece(data, random)))
        content[at : at + length] = new
    return bytes(content[: random.randint(0, len(content))] if random.random() < 0.1 else content)


def _piece(data: bytes, random: Random) -> bytes:
    at = random.randint(0, len(data))
    return data[at : at + random.choice((1, 4, 16, 256))]


def of_words(data: bytes, random: Random) -> bytes:
    """Replace, remove or repeat words, numbers and lines of a text."""
    if random.random() < 0.3:
        return of_bytes(data, random)
    separator = random.choice((b"\n", b"\n", b" ", b'"', b"=", b":", b","))
    parts = data.split(separator)
    for _ in range(random.choice((1, 1, 2, 4))):
        at, other = random.randrange(len(parts)), random.choice(parts)
        odd = str(random.choice(ODD)).encode("utf-8", "surrogatepass")
        parts[at : at + random.choice((0, 1, 1, 2))] = random.choice(([other], [odd], [], [parts[at]] * 50))
        parts = parts or [b""]
    return separator.join(parts)


def of_json(data: bytes, random: Random) -> bytes:
    """Replace, remove, nest or rename a value somewhere in JSON."""
    if random.random() < 0.2:
        return of_bytes(data, random)
    try:
        content = json.loads(data)
        for _ in range(random.choice((1, 1, 2, 3))):
            content = _exchanged(content, random)
        return json.dumps(content).encode()
    except (ValueError, RecursionError):
        return of_bytes(data, random)


def of_json_lines(data: bytes, random: Random) -> bytes:
    """The same in one of several lines."""
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    lines[at] = of_json(lines[at], random)
    return b"\n".join(lines)


def _exchanged(content: Any, random: Random) -> Any:
    places = list(_places(content))
    if not places or random.random() < 0.02:
        return random.choice(ODD)
    holder, key = random.choice(places)
    what = random.random()
    if what < 0.5:
        holder[key] = random.choice(ODD)
    elif what < 0.65:
        del holder[key]
    elif what < 0.8:
        other, its = random.choice(places)
        holder[key] = json.loads(json.dumps(other[its])) if its in _keys(other) else None
    elif what < 0.9:
        holder[key] = random.choice(([holder[key]], {"a": holder[key]}, str(holder[key])))
    elif isinstance(holder, dict):
        holder[str(random.choice(ODD))] = holder.pop(key)
    else:
        holder.insert(key, random.choice(ODD))
    return content


def _keys(holder: Any) -> Sequence[Any]:
    return list(holder) if isinstance(holder, dict) else range(len(holder))


def _places(content: Any) -> Any:
    if isinstance(content, (dict, list)):
        for key in _keys(content):
            yield content, key
            yield from _places(content[key])


_OPCODES = (
    *(b"N", b"\x88", b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\xff", b"]", b"}", b")", b"(", b"t", b"e", b"u"),
    *(
        b"0",
        b"2",
        b"1",
        b"R",
        b"b",
        b"\x81",
        b"\x85",
        b"\x86",
        b"\x87",
        b"Q",
        b".",
        b"s",
        b"a",
        b"\x8f",
        b"\x90",
    ),
    *(
        b"h\0",
        b"q\0",
        b"j\0\0\0\0",
        b"r\xff\xff\xff\x7f",
        b"p999999999\n",
        b"G\x7f\xf0\0\0\0\0\0\0",
        b"cos\nsystem\n",
    ),
    *(b"cbuiltins\neval\n", b"cbuiltins\ngetattr\n", b"ctorch\nload\n", b"ccollections\nOrderedDict\n"),
    *(
        b"X\x02\0\0\0cc",
        b"X\0\0\0\x10",
        b"\x8a\x09" + b"\xff" * 8 + b"\0",
        b"\x8b\xff\xff\xff\x7f",
        b"\x95" + b"\xff" * 8,
    ),
    *(
        b"\x96" + b"\xff" * 8,
        b"\x93",
        b"\x92",
        b"\x8e\0\0\0\0\0\0\0\x10",
        b"Ptorch\n",
        b"i__main__\nx\n",
        b"ctorch\nSize\n",
    ),
)


def of_pickle(data: bytes, random: Random) -> bytes:
    """Insert, replace and remove opcodes."""
    if random.random() < 0.4:
        return of_bytes(data, random)
    content = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randint(0, len(content))
        content[at : at + random.choice((0, 0, 1, 2, 5))] = random.choice(_OPCODES)
    return bytes(content)
