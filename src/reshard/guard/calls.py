"""A guard from the command to the report."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.guard.announce import FOLDER
from reshard.guard.before import check
from reshard.guard.command import Command, read_command
from reshard.guard.memory import Memory
from reshard.guard.options import Options
from reshard.guard.progress import Progress
from reshard.guard.relay import Relay
from reshard.guard.screen import Screen
from reshard.guard.stacks import read_stack
from reshard.guard.stall import Limits, Stall
from reshard.guard.supervision import Outcome, supervise
from reshard.guard.watching import Notice, Watcher

HOME = "reshard-guard"
"""Where the folders of runs are, in the working folder."""
LOG = "output.log"


def guarded(words: Sequence[str], options: Options, *, quiet: bool = False, stdout: int = 1) -> Outcome:
    """Run a command under guard, with its stdout on the descriptor `stdout`. Raises ReshardError if it is refused."""
    command = read_command(words, os.environ, Path.cwd())
    if options.check:
        _check(command, Screen(quiet=quiet))
    folder = _folder_for(options)
    relay = Relay.of(folder / LOG, stdout=stdout)
    screen = Screen(relay, quiet=quiet)
    screen.print(f"output is kept in {folder / LOG}")
    environment = {**os.environ, FOLDER: str(folder)}
    watchers = watchers_of(options, folder, environment)
    return supervise(words, environment, Path.cwd(), relay, watchers, screen.say)


def _check(command: Command, screen: Screen) -> None:
    """Print the warnings about a command, and what could not be checked. Raises ReshardError with its errors."""
    checked = check(command)
    for problem in checked.problems:
        if problem.severity != "error":
            screen.say(Notice(problem))
    for sentence in checked.unchecked:
        screen.print(sentence)
    if checked.errors:
        raise ReshardError(checked.errors)


def watchers_of(options: Options, folder: Path, environment: dict[str, str]) -> list[Watcher]:
    """The watchers of a run. `folder` is where its scripts announce themselves."""
    progress = Progress(options.nan_steps)
    stall = Stall(
        progress,
        partial(read_stack, folder=folder),
        Limits(startup=options.startup, stall=options.stall),
        stop=options.on_stall == "stop",
        environment=environment,
    )
    return [progress, stall, Memory()]


def _folder_for(options: Options) -> Path:
    """The folder for the log. A new one is inside of one with a .gitignore, since it is in the middle of a project."""
    if options.log:
        options.log.mkdir(parents=True, exist_ok=True)
        return options.log.absolute()
    home = Path(HOME).absolute()
    folder = home / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    (home / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder
