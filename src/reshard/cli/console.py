"""Output of commands: results on stdout, everything else on stderr, with or without a terminal."""

from __future__ import annotations

import codecs
import json
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import click

from reshard.base.errors import Problem, ReshardError, RunFailedError
from reshard.base.exceptions_to_problems import failed_to_print, problems_of
from reshard.base.foreign_text import (
    escape,
    escape_lines,
    printable_json,
    printable_line,
    printable_lines,
    strict,
    without_secrets,
)
from reshard.base.interrupts import raising
from reshard.base.quantities import size
from reshard.stores import StorePath

if TYPE_CHECKING:
    from rich.console import Console

    from reshard.transfer.leftovers import Unfinished

SHOWN = 12
"""Problems that are printed; others are only counted."""


PIPE_WIDTH = 200
"""Width of a table without a terminal, so that logs do not break tensor names."""


def stdout() -> Console:
    """The console for results. Rich respects NO_COLOR, and disables colour for pipes; lines wrap on terminals only."""
    from reshard.base.word_wrap import WrappingConsole  # imports rich, only if something is printed

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return WrappingConsole(soft_wrap=True, highlight=False, width=width)


def stderr() -> Console:
    """The console for progress, notes and errors."""
    from reshard.base.word_wrap import WrappingConsole

    return WrappingConsole(stderr=True, soft_wrap=True, highlight=False)


def print_json(content: Any) -> None:
    """Print the output of `--json`."""
    plain = codecs.lookup(sys.stdout.encoding or "ascii").name != "utf-8"
    text = json.dumps(strict(content), indent=2, ensure_ascii=plain, default=str, allow_nan=False)
    click.echo(printable_json(text))


def print_problems(problems: Sequence[Problem], console: Console | None = None) -> None:
    """Print problems, on stderr by default; at most `SHOWN` of them."""
    if not problems:
        return
    console = console or stderr()
    for problem in problems[:SHOWN]:
        style = "bold red" if problem.severity == "error" else "bold yellow"
        first, *rest = str(problem).split("\n")
        console.print(f"[{style}]{problem.severity}:[/] {escape(first)}")
        for line in rest:
            console.print(escape(line))
    print_omitted(len(problems) - SHOWN, console)


def print_omitted(number: int, console: Console) -> None:
    """Print how many things are not listed, if any are not."""
    if number > 0:
        console.print(f"… and {number} more (--json lists all)")


def handles_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn errors that a user can fix into a message and exit status 2; `--debug` shows the traceback."""

    @wraps(function)
    def wrapped(*args: Any, debug: bool, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (BrokenPipeError, click.ClickException):
            raise  # the reader of a pipe exited, or click prints the usage
        except KeyboardInterrupt as error:
            stopped = error if isinstance(error, Interrupted) else Interrupted()
            with suppress(OSError):  # the terminal may be gone
                stderr().print(escape_lines(str(stopped)))
            sys.exit(128 + stopped.signal)
        except Exception as error:
            if debug:
                click.echo(printable_lines(traceback.format_exc()), err=True, nl=False)
            if isinstance(error, OSError) and failed_to_print(error):
                raise  # `main` reports it, and prints nothing more
            problems, status = problems_of(error), 1 if isinstance(error, RunFailedError) else 2
        print_problems(problems)
        if kwargs.get("json_output"):
            print_json({"problems": [problem.as_dict() for problem in problems]})
        sys.exit(status)

    return wrapped


class Interrupted(KeyboardInterrupt):
    """The user or the system asked the program to end.

    `complete` names the output if it is already in place; `kept` is what the next run continues.
    """

    def __init__(
        self, number: int = signal.SIGINT, complete: Path | None = None, kept: Unfinished | None = None
    ) -> None:
        super().__init__()
        self.signal = number
        self.complete = complete
        self.kept = kept

    def __str__(self) -> str:
        by = "" if self.signal == signal.SIGINT else f" by {signal.Signals(self.signal).name}"
        return f"interrupted{by}: {f'{self.complete} is complete' if self.complete else self._state_text()}"

    def _state_text(self) -> str:
        if self.kept is None:
            return "nothing was changed"
        written = f"{size(self.kept.nbytes or 0)} of {size(self.kept.total or 0)} are written and kept"
        return f"{written}\ncontinue with: {self.kept.command or 'the same call'}"


ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a program: schedulers send the first, or the last if configured to warn before it."""


@contextmanager
def clean_end(target: Path) -> Iterator[None]:
    """Let `ENDING` signals stop writing to `target` as Ctrl-C does, and raise Interrupted for all of them."""
    from reshard.transfer.uploading import unfinished_at  # imports numpy, which help texts do not need

    identity = _identity(target)
    with raising(ENDING, Interrupted):
        try:
            yield
        except KeyboardInterrupt as error:
            number = error.signal if isinstance(error, Interrupted) else signal.SIGINT
            complete = None if _identity(target) in (None, identity) else target
            kept = []
            with suppress(ReshardError):  # if a store does not answer, continuing the run reports it
                kept = [each for each in unfinished_at(target) if each.nbytes and not each.live]
            raise Interrupted(number, complete, kept[0] if kept else None) from error


def _identity(path: Path) -> tuple[int, int] | str | None:
    """A value that changes when a complete output is moved to its destination."""
    if isinstance(path, StorePath):
        from reshard.transfer.uploading import finished_at

        return finished_at(path)
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


_PRINTING = ("--json", "--debug", "--quiet", "-q")


def typed() -> str:
    """The command line of this run, quoted for a shell, without options that only change the printing."""
    root = click.get_current_context().find_root()
    arguments = (without_secrets(word) for word in root.obj or () if word not in _PRINTING)
    return printable_line(f"{root.info_name} {shlex.join(arguments)}")


def common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json` and `--debug`, which every command has."""
    function = click.option("--debug", is_flag=True, help="Show the traceback of errors.")(function)
    return click.option("--json", "json_output", is_flag=True, help="Print JSON.")(function)


PLAIN_EVERY = 5.0
"""Seconds between progress lines in a log."""


@contextmanager
def progress(what: str, total: int, done: int = 0, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show bytes, rate and time left: a bar on a terminal, plain lines elsewhere, nothing if `quiet`."""
    if quiet:
        yield lambda count: None
    elif (console := stderr()).is_terminal:
        with _bar(console) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda count: bar.advance(task, count)
    else:
        yield _PlainProgress(what, total, done, console)


def _bar(console: Console) -> Any:
    from rich import progress as rich_progress

    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )


PATIENCE = 2.0
"""Seconds after which a slow step is named in a log."""


class Watch:
    """Progress of a command: first its steps, then a bar of bytes; nothing if `quiet`."""

    def __init__(self, what: str, *, quiet: bool) -> None:
        self._what, self._quiet = what, quiet
        self._shown = ExitStack()
        self.step: Callable[[str], None] = lambda step: None
        self.advance: Callable[[int], None] = lambda count: None

    def __enter__(self) -> Watch:
        self.step = self._shown.enter_context(_steps(quiet=self._quiet))
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self, total: int, done: int = 0) -> None:
        """Replace the steps by a bar of `total` bytes, of which `done` are done already."""
        self.end()
        self.advance = self._shown.enter_context(progress(self._what, total, done, quiet=self._quiet))

    def upload(self, what: str) -> None:
        """Show an upload by huggingface_hub: its own bars on a terminal, plain lines elsewhere."""
        from huggingface_hub.utils import disable_progress_bars

        self.end()
        if self._quiet or not stderr().is_terminal:
            disable_progress_bars()
            self._shown.enter_context(_steps(quiet=self._quiet))(what)

    def end(self) -> None:
        """Remove what is shown, so that something else can be printed."""
        self._shown.close()


@contextmanager
def _steps(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the current step and its duration: a spinner on a terminal, plain lines elsewhere."""
    if quiet:
        yield lambda step: None
    elif (console := stderr()).is_terminal and not console.is_dumb_terminal:
        with _spinner(console) as spinner:
            task = spinner.add_task("starting", total=None)
            yield lambda step: spinner.update(task, description=step)
    else:
        with _PlainSteps(console) as plain:
            yield plain


def _spinner(console: Console) -> Any:
    from rich import progress as rich_progress

    return rich_progress.Progress(
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    )


class _PlainSteps:
    """Lines for logs: the first after `PATIENCE` seconds, then one every `PLAIN_EVERY` seconds."""

    def __init__(self, console: Console) -> None:
        self._console, self._step = console, "starting"
        self._ended = Event()
        self._thread = Thread(target=self._tell, daemon=True)

    def __call__(self, step: str) -> None:
        self._step = step

    def __enter__(self) -> _PlainSteps:
        self._begin = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _tell(self) -> None:
        pause = PATIENCE
        while not self._ended.wait(pause):
            self._console.print(f"{self._step}, {time.monotonic() - self._begin:.0f} s")
            pause = PLAIN_EVERY


class _PlainProgress:
    """Lines for logs, one every `PLAIN_EVERY` seconds; short runs print none."""

    def __init__(self, what: str, total: int, done: int, console: Console) -> None:
        self._what, self._total, self._console = what, total, console
        self._before = self._done = done
        self._begin = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last >= PLAIN_EVERY:
            self._last = now
            rate = (self._done - self._before) / (now - self._begin)
            left = (self._total - self._done) / rate
            self._console.print(
                f"{self._what}: {size(self._done)} of {size(self._total)}, {size(rate)}/s, {left:.0f} s left"
            )
