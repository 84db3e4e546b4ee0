"""Finite values that a narrower dtype cannot hold: a cast would make them infinite, and the output useless."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from reshard.base.errors import Problem

LARGEST_FINITE = {
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float32": (2 - 2.0**-23) * 2.0**127,
    "float64": (2 - 2.0**-52) * 2.0**1023,
}
"""The largest finite value of each dtype that can be cast to."""


class Overflow(NamedTuple):
    """Finite values that became infinite: how many, the largest magnitude, and the dtype that cannot hold it."""

    values: int
    largest: float
    dtype: str

    def joined(self, other: Overflow | None) -> Overflow:
        """Both together; the dtype is that of the largest value."""
        if other is None:
            return self
        worst = max(self, other, key=lambda each: each.largest)
        return worst._replace(values=self.values + other.values)


class Overflows:
    """What some casts have lost so far."""

    def __init__(self) -> None:
        self.found: Overflow | None = None

    def add(self, overflow: Overflow) -> None:
        """Add what one cast has lost."""
        self.found = overflow.joined(self.found)

    def of(self, nonfinite: int) -> Overflow | None:
        """What was lost in a result with this many elements that are not finite.

        A computed source may cast more elements than are needed of it, and some of them twice.
        """
        values = min(self.found.values, nonfinite) if self.found else 0
        return self.found._replace(values=values) if self.found and values else None


def overflow_problem(tensor: str, overflow: Overflow) -> Problem:
    """The error for values of a tensor that do not fit."""
    values, largest, dtype = overflow
    return Problem(
        "values-overflow",
        "finite values do not fit the dtype of the output, and would become infinite",
        tensor=tensor,
        rule="a conversion keeps every finite value finite",
        expected=f"at most {LARGEST_FINITE[dtype]:g}, the largest {dtype}",
        found=f"{values:,} value{'' if values == 1 else 's'} in the output, the largest of magnitude {largest:g}",
        remedy=_remedy(largest),
    )


def _remedy(largest: float) -> str:
    wider = [f"--dtype {name}" for name in ("bfloat16", "float32") if LARGEST_FINITE[name] >= largest]
    if not wider:
        return "keep float64: --to huggingface, without --dtype"
    return f"pass {' or '.join(wider)}, or leave out --dtype to keep that of the source"


def total(overflows: Iterable[tuple[str, Overflow]]) -> dict[str, Overflow]:
    """Overflows by tensor, of which each block has its own."""
    totals: dict[str, Overflow] = {}
    for name, overflow in overflows:
        totals[name] = overflow.joined(totals.get(name))
    return totals
