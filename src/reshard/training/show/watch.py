"""Shows a run while it goes: its history, the progress line, and the report."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console

from reshard.base.shown import escape
from reshard.training.run import Run
from reshard.training.show import report
from reshard.training.show.display import Display, evaluated
from reshard.training.show.monitor import History, Row

REFRESH = 5.0
"""Minimum seconds between two reports; more if drawing one takes long."""
SHARE = 20
"""Drawing reports takes at most one part in this many of the time."""


class Watch:
    """A context that shows the rows of a run as they come."""

    def __init__(self, run: Run, console: Console, *, quiet: bool = False) -> None:
        self.history = History()
        self._run, self._new = run, True
        self._due = 0.0
        self._leads = run.ranks.node_rank == 0
        waiting = "loading" if self._leads else f"node {run.ranks.node_rank} of {run.ranks.nnodes}"
        self._display = Display(console, quiet=quiet, waiting=waiting)

    def __enter__(self) -> Watch:
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.__exit__(kind, error, trace)

    def add(self, row: Row) -> None:
        """Add a row, and show it."""
        self.history.add(row)
        self._new = True
        if not self._leads:
            return
        if row["event"] == "saved":
            self._display.say(f"saved {escape(row['checkpoint'])}")
        elif row["event"] == "eval":
            self._display.say(f"[bold]evaluated[/] {escape(evaluated(row, self.history.method))}")
        elif row["event"] == "note":
            self._display.say(f"[bold]note:[/] {escape(row['text'])}")
        self.look()

    def look(self) -> None:
        """Update the progress line, and the report if it is due."""
        if not self._leads:
            self._display.show(History())
            return
        self._display.show(self.history)
        begin = time.monotonic()
        if self._new and begin >= self._due:
            with suppress(OSError):  # a run does not end because its report cannot be written
                report.write(self._run.output, self.history)
            self._new = False
            self._due = time.monotonic() + max(REFRESH, SHARE * (time.monotonic() - begin))
