"""Values that a pickle could have made anything: looked at before they are counted with, and shown in short."""

from __future__ import annotations

import reprlib
from typing import Any

from reshard.dtypes import DType
from reshard.errors import ReshardError


def sizes(values: Any) -> tuple[int, ...]:
    """`values` as counts or strides. Raises TypeError if they are something else."""
    if not isinstance(values, tuple | list) or not all(
        type(value) is int and 0 <= value < 1 << 62 for value in values
    ):
        raise TypeError(f"{reprlib.repr(values)} where sizes are expected")
    return tuple(values)


DIMENSIONS = 64
"""More axes than any tensor of torch has."""


def shape_of(values: Any) -> tuple[int, ...]:
    """`values` as the sizes or strides of a tensor. Raises TypeError if they are something else."""
    if isinstance(values, tuple | list) and len(values) > DIMENSIONS:
        raise TypeError(f"{len(values)} axes where a tensor has at most {DIMENSIONS}")
    return sizes(values)


def element_type(value: Any) -> DType:
    """`value` as an element type. Raises TypeError if it is something else."""
    if not isinstance(value, DType):
        raise TypeError(f"{reprlib.repr(value)} is not an element type")
    return value


def said(error: Exception) -> str:
    """The kind of an error and its words. What it was handed is shown in short: a list that holds another twice, and
    that one the next, has no end.
    """
    plain = all(isinstance(argument, str) for argument in error.args)
    return f"{type(error).__name__}: {error if plain else ', '.join(map(reprlib.repr, error.args))}"


def damaged(file: str, found: str) -> ReshardError:
    """The error for a pickle that is not what a framework wrote."""
    return ReshardError(
        "a pickle cannot be read",
        file=file,
        expected="a pickle as torch writes it",
        found=found,
        remedy="the file is damaged: copy or download it again",
    )
