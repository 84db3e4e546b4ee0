"""The pieces of a SentencePiece model (`tokenizer.model`), from its protocol buffer.

`ModelProto` has the pieces in field 1; a piece has its text in 1, its score in 2 and its type in 3
(`sentencepiece_model.proto` of google/sentencepiece).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces; those of tokens in a GGUF file are the same."""
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
"""How values are stored, by number."""


class VocabularyPiece(NamedTuple):
    text: bytes
    score: float
    type: int


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends. Raises ValueError."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            raise ValueError("it ends within a number")
        number |= (content[at] & 0x7F) << shift
        at += 1
        if content[at - 1] < 0x80:
            return number, at
    raise ValueError("it contains a number of more than ten bytes")


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, by number. Raises ValueError."""
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        if (kind := tag & 7) == _VARINT:
            value, at = _varint(content, at)
            yield tag >> 3, value
            continue
        if kind not in (_EIGHT, _BYTES, _FOUR):
            raise ValueError(f"it contains a field of the unknown kind {kind}")
        size, at = _varint(content, at) if kind == _BYTES else ({_EIGHT: 8, _FOUR: 4}[kind], at)
        if at + size > len(content):
            raise ValueError("it ends within a field")
        yield tag >> 3, content[at : at + size]
        at += size


def _piece(content: bytes) -> VocabularyPiece:
    """One piece; protocol buffers leave out a type that is `NORMAL` and a score that is 0."""
    fields = dict(_fields(content))
    text, score, kind = fields.get(1, b""), fields.get(2, bytes(4)), fields.get(3, NORMAL)
    if (
        not isinstance(text, bytes)
        or not isinstance(score, bytes)
        or not isinstance(kind, int)
        or len(score) != 4
    ):
        raise ValueError("it contains a piece that is not one of SentencePiece")
    return VocabularyPiece(text, struct.unpack("<f", score)[0], kind)


def pieces(content: bytes) -> list[VocabularyPiece]:
    """The pieces of a model, by id. Raises ValueError."""
    pieces = [_piece(value) for number, value in _fields(content) if number == 1 and isinstance(value, bytes)]
    if not pieces:
        raise ValueError("it contains no pieces")
    return pieces
