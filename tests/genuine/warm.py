"""A small process with torch and megatron-core, from which the ranks of the tests are forked.

A fork copies the tables of all memory of its parent, and pytest's process becomes large: a rank that is forked from
it takes a third longer.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, wraps
from typing import ParamSpec, TypeVar

from reshard.oracle.megatron.ranks import import_all
from tests.genuine.mcore.models import megatron_logits as megatron_logits_here
from tests.genuine.mcore.ranks import run_ranks as run_ranks_here

P = ParamSpec("P")
T = TypeVar("T")


@cache
def _server() -> ProcessPoolExecutor:
    spawned = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawned, initializer=import_all)


def close() -> None:
    """End the small process, if there is one."""
    if _server.cache_info().currsize:
        _server().shutdown()
        _server.cache_clear()


def _is_pytest() -> bool:
    """Whether this process runs the tests, and is not one that they started."""
    return "pytest" in sys.modules and multiprocessing.parent_process() is None


def _served(function: Callable[P, T]) -> Callable[P, T]:
    """The function, called in the small process. Arguments and results are pickled; patches do not reach it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _is_pytest():
            return function(*args, **kwargs)
        return _server().submit(function, *args, **kwargs).result()

    return call


run_ranks = _served(run_ranks_here)
megatron_logits = _served(megatron_logits_here)
