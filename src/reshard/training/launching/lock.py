"""A lock that keeps other runs from writing to the same output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from reshard.base.errors import ReshardError
from reshard.training.run import Run
from reshard.transfer import locks

LOCK = ".lock"


@contextmanager
def held(run: Run) -> Iterator[None]:
    """Hold the lock of a run's output. Raises ReshardError if another run holds it.

    The system releases the lock when its process ends, however it ends. Without file locks, none is held.
    """
    path = run.output / LOCK
    run.output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.held(path))
        except BlockingIOError:
            raise ReshardError(
                "output-in-use",
                "another run is writing to the output",
                file=str(run.output),
                found=f"{path} is held by a running process",
                remedy="wait for it, stop it, or choose another folder with -o",
            ) from None
        except OSError:
            pass  # the next write to the output fails with the cause
        yield
