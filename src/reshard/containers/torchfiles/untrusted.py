"""Validate values from a pickle, which could be anything, before computing with them; show them shortened.

A pair of a pair of a pair …, each twice the same object, takes years to hash, to compare and to print, and no signal
interrupts that. So a value is checked before it becomes a key, and `reprlib` shows it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.algebra.dtypes import DType
from reshard.algebra.storage import StoredTensor
from reshard.base.errors import ReshardError

MAX_NUMBER = 1 << 62
"""More elements or bytes than any tensor has."""


def sizes(values: Any) -> tuple[int, ...]:
    """`values` as sizes or strides. Raises TypeError for anything else."""
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"{reprlib.repr(values)} where sizes are expected")
    for value in values:
        if type(value) is not int or not 0 <= value < MAX_NUMBER:
            raise TypeError(f"{reprlib.repr(values)} where sizes are expected")
    return tuple(values)


MAX_AXES = 64
"""More axes than any torch tensor has."""


def shape_of(values: Any) -> tuple[int, ...]:
    """`values` as the sizes or strides of a tensor. Raises TypeError for anything else."""
    if isinstance(values, (tuple, list)) and len(values) > MAX_AXES:
        raise TypeError(f"{len(values)} axes where a tensor has at most {MAX_AXES}")
    return sizes(values)


def text(value: Any) -> str:
    """`value` as a text, such as a name that is looked up. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{reprlib.repr(value)} where a text is expected")
    return value


def element_type(value: Any) -> DType:
    """`value` as an element type. Raises TypeError for anything else."""
    if not isinstance(value, DType):
        raise TypeError(f"{reprlib.repr(value)} is not an element type")
    return value


def nested(content: Any, kinds: Any = (Mapping, list, tuple)) -> Iterator[Any]:
    """`content`, and everything nested in it; no container of these kinds is entered twice.

    Otherwise a chain of containers that each contain the next one twice would take forever, and so would a cycle.
    """
    waiting, entered = [content], set()
    while waiting:
        each = waiting.pop()
        if id(each) in entered:
            continue
        yield each
        if isinstance(each, kinds):
            entered.add(id(each))
            waiting += reversed(list(each.values() if isinstance(each, Mapping) else each))


def stored_in(content: Any) -> Iterator[StoredTensor]:
    """All tensors in nested dicts and lists."""
    return (each for each in nested(content) if isinstance(each, StoredTensor))


def values_of(content: Any, key: str) -> Iterator[Any]:
    """All values of a key in nested dicts."""
    return (each[key] for each in nested(content, Mapping) if isinstance(each, Mapping) and key in each)


def number_of(content: Any, most: int) -> int:
    """The number of values in nested dicts and lists, with repetitions; more than `most` if it exceeds `most`."""
    waiting, count = [content], 0
    while waiting and count <= most:
        each, count = waiting.pop(), count + 1
        if isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
    return count


def damaged_pickle(file: str, found: str) -> ReshardError:
    """The error for a pickle that no framework wrote like this."""
    return ReshardError(
        "pickle-unreadable",
        "a pickle cannot be read",
        file=file,
        expected="a pickle as torch writes it",
        found=found,
        remedy="the file is damaged: copy or download it again",
    )
