"""In a script that imports reshard.guard under the command `reshard guard`: show the stack on a signal.

Python's faulthandler writes it from C, so it works while the main thread waits in a collective, and where other
processes may not attach to this one. The system call that the signal interrupts is restarted.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path

FOLDER_VARIABLE = "RESHARD_GUARD"
"""The environment variable in which the command passes a folder to its processes."""
STACK_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 5
"""A real-time signal that no library is known to use."""


def stack_file(folder: Path, pid: int) -> Path:
    """The file into which a process writes its stack. If it exists, the process can be sent SIGNAL."""
    return folder / f"stack-{pid}"


def announce() -> None:
    """Register this process, if it runs under the command. Forked processes stay unregistered."""
    folder = os.environ.get(FOLDER_VARIABLE)
    with suppress(OSError, ValueError, RuntimeError):
        if folder and hasattr(faulthandler, "register"):
            path = stack_file(Path(folder), os.getpid())
            # The file gets its name only once the handler is there: before that, the signal would end the process.
            file = open(path.with_suffix(".new"), "a")  # noqa: SIM115 - open as long as the process
            faulthandler.register(STACK_SIGNAL, file, all_threads=False)
            path.with_suffix(".new").rename(path)
