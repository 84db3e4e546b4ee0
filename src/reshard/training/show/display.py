"""The progress line of a run: redrawn on a terminal, otherwise printed every few seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from reshard.base.errors import memory_size
from reshard.training.methods import headline
from reshard.training.show.monitor import History, Row, number

PLAIN_EVERY = 5.0
"""Seconds between two lines in a log."""
BAR, LEAST = 20, 5
"""Columns of the bar, and the fewest with which it is drawn."""


class Display:
    """A context that shows a run on `console`, or nothing if it is `quiet`."""

    def __init__(self, console: Console, *, quiet: bool = False, waiting: str = "starting") -> None:
        self._console, self._quiet, self._waiting = console, quiet, waiting
        self._live = Live(console=console, transient=True, refresh_per_second=4)
        self._redraws = console.is_terminal and not quiet
        self._begin = self._printed = time.monotonic()
        self._shown, self._told = -1, ""

    def __enter__(self) -> Display:
        if self._redraws:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._redraws:
            self._live.stop()
            if self._told:
                self._console.print(self._told, markup=False)

    def show(self, history: History) -> None:
        """Update the line. Without a terminal, print one every few seconds, and for the last step."""
        if self._redraws:
            self._told = words(history) if history.total else ""
            self._live.update(self._line(history))
            return
        if self._quiet or not history.total or history.done == self._shown:
            return
        is_last = history.done == history.total
        if is_last or self._shown < 0 or time.monotonic() - self._printed >= PLAIN_EVERY:
            self._printed, self._shown = time.monotonic(), history.done
            self._console.print(words(history), markup=False)

    def say(self, text: str) -> None:
        """Print a separate line above the progress line."""
        if not self._quiet:
            self._console.print(text)

    def _line(self, history: History) -> Text:
        if not history.total:
            return Text(f"{self._waiting} … {clock(time.monotonic() - self._begin)}", no_wrap=True)
        told = words(history)
        columns = min(BAR, self._console.width - len(told) - 3)
        if columns < LEAST:
            return Text(told, no_wrap=True, overflow="ellipsis")
        filled = round(columns * min(history.done / history.total, 1))
        bar = Text("━" * filled, style="cyan") + Text("╌" * (columns - filled), style="dim")
        return Text.assemble(bar, "  ", told, no_wrap=True, overflow="ellipsis")


def words(history: History) -> str:
    """The text of the line: step 12/100  reward 0.7500  lr 1.0e-05  12.3k tok/s  3.9 GiB  0:03:12 left."""
    rate, speed, memory, left = (
        history.latest("learning_rate"),
        history.speed,
        history.latest("memory"),
        history.left,
    )
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


def evaluated(row: Row, method: str | None = None) -> str:
    """The text about an evaluation: after step 12  reward 0.5000."""
    measured = ((each.words, number(row, f"eval_{each.name}")) for each in headline(method))
    told = [f"{name} {value:.4f}" for name, value in measured if value is not None]
    return "  ".join([f"after step {row['step']}", *told])


def short(value: float) -> str:
    """A count with three or four digits: 512, 12.3k, 4.1M, 8.33e+29."""
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.0f}" if not unit else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f}G" if value < 1000 else f"{value * 1e9:.3g}"


def clock(seconds: float) -> str:
    """A duration as h:mm:ss, preceded by days if there are any."""
    days, rest = divmod(round(seconds), 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {text}" if days else text
