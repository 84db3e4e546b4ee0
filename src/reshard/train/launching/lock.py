"""One run at a time writes into an output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from reshard.errors import ReshardError
from reshard.train.run import Run
from reshard.transfer import locks

LOCK = ".lock"


@contextmanager
def held(run: Run) -> Iterator[None]:
    """Hold the output of a run while it goes. Raises ReshardError if another run does.

    The lock ends with the process that holds it, however that ends. Where a file system has no locks, none is held.
    """
    path = run.output / LOCK
    run.output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.held(path))
        except BlockingIOError:
            raise ReshardError(
                "output-in-use",
                "another run writes into the output",
                file=str(run.output),
                found=f"{path} is held by a running process",
                remedy="wait for it, or end it; or name another folder with -o",
            ) from None
        except OSError:
            pass  # whatever is written next says why
        yield
