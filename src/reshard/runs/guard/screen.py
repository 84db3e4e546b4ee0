"""What a guard prints among the output of its command: on stderr, at the start of a line."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from reshard.base.foreign_text import escape, escape_lines
from reshard.runs.guard.supervise.output_relay import OutputRelay
from reshard.runs.guard.watch.watcher import Notice

if TYPE_CHECKING:
    from rich.console import Console

LINE_PREFIX = "reshard guard: "
NOT_CHECKED_MARK = "○"


class GuardScreen:
    """Prints lines of the guard."""

    def __init__(self, relay: OutputRelay | None = None, *, quiet: bool = False) -> None:
        self._relay, self._quiet = relay, quiet

    @property
    def console(self) -> Console:
        """The console, at the start of a line."""
        from reshard.base.word_wrap import WrappingConsole

        terminal = self._relay.terminal if self._relay else None
        file = terminal.stderr() if terminal and terminal.is_raw else None
        console = WrappingConsole(file=file, stderr=True, soft_wrap=True, highlight=False)
        if self._relay and not self._relay.at_start:
            console.print()
        return console

    def print(self, text: str) -> None:
        """Print a note, unless the guard is quiet."""
        if not self._quiet:
            with suppress(OSError):  # the terminal may be gone
                self.console.print(f"[dim]{LINE_PREFIX}{escape(text)}[/]")

    def say(self, notice: Notice) -> None:
        """Print what a watcher has to say."""
        with suppress(OSError):
            console = self.console
            style = "bold red" if notice.problem.severity == "error" else "bold yellow"
            first, *rest = str(notice.problem).split("\n")
            console.print(f"[{style}]{LINE_PREFIX}{escape(first)}[/]")
            for line in (*rest, *notice.lines):
                console.print(escape_lines(line))
