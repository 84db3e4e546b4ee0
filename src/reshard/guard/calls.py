"""A guard from the command to the report."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from reshard.guard.options import Options
from reshard.guard.relay import Relay
from reshard.guard.screen import Screen
from reshard.guard.supervision import Outcome, supervise

FOLDER = "reshard-guard"
"""Where the logs of runs are, in the working folder."""
LOG = "output.log"
VARIABLE = "RESHARD_GUARD"
"""Names the folder of the log to the processes of the run."""


def guarded(words: Sequence[str], options: Options, *, quiet: bool = False, stdout: int = 1) -> Outcome:
    """Run a command under guard, with its stdout on the descriptor `stdout`. Raises ReshardError if it is refused."""
    folder = _log_folder(options)
    relay = Relay.of(folder / LOG, stdout=stdout)
    screen = Screen(relay, quiet=quiet)
    screen.print(f"output is kept in {folder / LOG}")
    return supervise(words, {**os.environ, VARIABLE: str(folder)}, Path.cwd(), relay, (), screen.say)


def _log_folder(options: Options) -> Path:
    """A new folder for the log. One that is made here has a .gitignore, since it is in the middle of a project."""
    if options.log:
        options.log.mkdir(parents=True, exist_ok=True)
        return options.log.absolute()
    home = Path(FOLDER).absolute()
    folder = home / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    (home / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder
