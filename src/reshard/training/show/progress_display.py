"""Shows a run while it goes: a line of progress, redrawn on a terminal or else printed now and then; and the report."""

from __future__ import annotations

import time
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from reshard.base.errors import memory_size
from reshard.base.foreign_text import escape
from reshard.training.methods import headline
from reshard.training.run import Run
from reshard.training.show import html_report
from reshard.training.show.html_report import clock, short
from reshard.training.show.metrics import History, MetricsRow, number

PLAIN_SECONDS = 5.0
"""Seconds between two lines in a log."""
BAR, LEAST = 20, 5
"""Columns of the bar, and the fewest with which it is drawn."""
REPORT_SECONDS = 5.0
"""Minimum seconds between two reports; more if drawing one takes long."""
REPORT_TIME_SHARE = 20
"""Drawing reports takes at most one part in this many of the time."""


class ProgressDisplay:
    """A context that shows the rows of a run as they come; on other nodes than the first, only that it waits."""

    def __init__(self, run: Run, console: Console, *, quiet: bool = False) -> None:
        self.history = History()
        self._run, self._console, self._quiet = run, console, quiet
        self._leads = run.ranks.node_rank == 0
        self._redraws = console.is_terminal and not quiet
        self._begin = time.monotonic()
        self._live = Live(console=console, transient=True, refresh_per_second=4, get_renderable=self._line)
        self._shown, self._printed = -1, -PLAIN_SECONDS
        self._new, self._due = True, 0.0

    def __enter__(self) -> ProgressDisplay:
        if self._redraws:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._redraws:
            self._live.stop()
            self._print_line()

    def add(self, row: MetricsRow) -> None:
        """Add a row, and show it."""
        self.history.add(row)
        self._new = True
        if self._leads and not self._quiet and (text := _told(row, self.history.method)):
            self._console.print(text)
        self.look()

    def look(self) -> None:
        """Print a line if it is due and not redrawn, and draw the report if that is due."""
        now, history = time.monotonic(), self.history
        is_due = now - self._printed >= PLAIN_SECONDS or history.done == history.total
        if is_due and history.done != self._shown and not self._quiet and not self._redraws:
            self._print_line()
        if self._new and self._leads and now >= self._due:
            with suppress(OSError):  # a run does not end because its report cannot be written
                html_report.write(self._run.output, history)
            self._new = False
            self._due = time.monotonic() + max(REPORT_SECONDS, REPORT_TIME_SHARE * (time.monotonic() - now))

    def _print_line(self) -> None:
        if self._leads and self.history.total:
            self._printed, self._shown = time.monotonic(), self.history.done
            self._console.print(words(self.history), markup=False)

    def _line(self) -> Text:
        """The line that is redrawn."""
        history, ranks = self.history, self._run.ranks
        if not self._leads or not history.total:
            waiting = "loading" if self._leads else f"node {ranks.node_rank} of {ranks.nnodes}"
            return Text(f"{waiting} … {clock(time.monotonic() - self._begin)}", no_wrap=True)
        told = words(history)
        columns = min(BAR, self._console.width - len(told) - 3)
        if columns < LEAST:
            return Text(told, no_wrap=True, overflow="ellipsis")
        filled = round(columns * min(history.done / history.total, 1))
        bar = Text("━" * filled, style="cyan") + Text("╌" * (columns - filled), style="dim")
        return Text.assemble(bar, "  ", told, no_wrap=True, overflow="ellipsis")


def words(history: History) -> str:
    """The text of the line: step 12/100  reward 0.7500  lr 1.0e-05  12.3k tok/s  3.9 GiB  0:03:12 left."""
    rate, memory = history.latest("learning_rate"), history.latest("memory")
    speed, left = history.speed, history.left
    measured = ((each.words, history.latest(each.name)) for each in headline(history.method))
    parts = [
        f"step {history.done}/{history.total}",
        *(f"{name} {value:.4f}" for name, value in measured if value is not None),
        f"lr {rate:.1e}" if rate is not None else "",
        f"{short(speed)} tok/s" if speed is not None else "",
        memory_size(memory) if memory is not None else "",
        f"{clock(left)} left" if left is not None and history.done < history.total else "",
    ]
    return "  ".join(part for part in parts if part)


def _told(row: MetricsRow, method: str | None) -> str:
    """What a row says besides the line; "" if nothing."""
    if row["event"] == "saved":
        return f"saved {escape(row['checkpoint'])}"
    if row["event"] == "note":
        return f"[bold]note:[/] {escape(row['text'])}"
    return f"[bold]evaluated[/] {escape(evaluated(row, method))}" if row["event"] == "eval" else ""


def evaluated(row: MetricsRow, method: str | None = None) -> str:
    """The text about an evaluation: after step 12  reward 0.5000."""
    measured = ((each.words, number(row, f"eval_{each.name}")) for each in headline(method))
    told = [f"{name} {value:.4f}" for name, value in measured if value is not None]
    return "  ".join([f"after step {row['step']}", *told])
