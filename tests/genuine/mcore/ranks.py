"""Ranks that can do more than evaluate a model: see `cpu_patches`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from reshard.oracle.megatron import ranks
from tests.genuine.mcore import cpu_patches

T = TypeVar("T")


def run_ranks(world_size: int, function: Callable[..., T], *args: Any) -> list[T]:
    """Call `function(*args)` on each rank of a gloo process group; see `reshard.oracle.megatron.ranks.run_ranks`."""
    return ranks.run_ranks(world_size, _patched, function, args)


def _patched(function: Callable[..., T], args: Any) -> T:
    cpu_patches.enable()
    return function(*args)
