"""The cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn off the cyclic garbage collector. Also decorates functions that create millions of objects without cycles.

    Python would otherwise examine all objects again whenever their number has grown by a quarter. New objects are in
    the oldest generation at the end of the block, so they are not examined then either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.unfreeze()  # to the oldest generation
            gc.enable()
