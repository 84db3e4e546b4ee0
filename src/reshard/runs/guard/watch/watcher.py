"""The interface of what watches a run: it is told lines and processes, and returns notices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from reshard.base.errors import Problem
from reshard.runs.guard.watch.process_tree import Processes


@dataclass(frozen=True)
class OutputLine:
    """A line that the run printed, without its end. A progress bar that redraws itself is a line each time.

    `time` is in seconds since the epoch, and `rank` is None if the line does not name it.
    """

    time: float
    text: str
    rank: int | None = None


@dataclass(frozen=True)
class Notice:
    """A problem of a running command, with more lines to show, such as one for each rank. `stop` ends the run."""

    problem: Problem
    lines: tuple[str, ...] = ()
    stop: bool = False


class Watcher(Protocol):
    """Is told each line as it is printed, and the processes of the run about once in a second."""

    def line(self, line: OutputLine) -> Iterable[Notice]:
        """What this line is reason to say; nothing by default."""
        return ()

    def tick(self, now: float, processes: Processes) -> Iterable[Notice]:
        """What the state of the processes is reason to say, by default nothing. `now` is in seconds since the epoch."""
        return ()
