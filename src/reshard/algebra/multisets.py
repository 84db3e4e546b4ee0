"""Which bytes of a storage are used, and how often: multisets of positions that can be added in any order.

A multiset of positions x is represented by its size and by the sum of r^x modulo a prime, for one random r. Two
different multisets of positions below n have the same sum for fewer than n of the 2^127 possible r (a polynomial of
degree n has no more roots), so equal sums prove equal multisets, with an error probability below 2^-70. The sum of a
strided piece is a product of geometric series: one costs as much for one element as for a billion, and nothing else
is stored.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

PRIME = (1 << 127) - 1
BASE = secrets.randbelow(PRIME - (1 << 64)) + (1 << 63)


class Multiset(NamedTuple):
    """`numel` positions, and the sum of `BASE` raised to each of them."""

    numel: int = 0
    total: int = 0

    def plus(self, other: Multiset) -> Multiset:
        """All positions of both."""
        return Multiset(self.numel + other.numel, (self.total + other.total) % PRIME)

    def minus(self, other: Multiset) -> Multiset:
        """The positions left after removing those of `other`, all of which must be there."""
        return Multiset(self.numel - other.numel, (self.total - other.total) % PRIME)

    def times(self, factor: int) -> Multiset:
        """Each position, `factor` times."""
        return Multiset(self.numel * factor, self.total * factor % PRIME)

    @staticmethod
    def of(start: int, axes: Iterable[tuple[int, int]], size: int = 1) -> Multiset:
        """`start` + Σ i·step for all i below the count of each of `axes`, for items of `size` positions."""
        count, total = size, _power(start * size) * _series(1, size)
        for n, step in axes:
            count *= n
            total = total * _series(step * size, n) % PRIME
        return Multiset(count, total % PRIME)


def total(parts: Iterable[Multiset]) -> Multiset:
    """All positions of all parts."""
    positions = Multiset()
    for part in parts:
        positions = positions.plus(part)
    return positions


@lru_cache(1 << 16)
def _power(exponent: int) -> int:
    return pow(BASE, exponent, PRIME)


@lru_cache(1 << 16)
def _series(step: int, count: int) -> int:
    """The sum of BASE^(i·step) for all i below `count`."""
    if step == 0 or count == 1:
        return count
    ratio = _power(step)
    return (pow(ratio, count, PRIME) - 1) * pow(ratio - 1, -1, PRIME) % PRIME
