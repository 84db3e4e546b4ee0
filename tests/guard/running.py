"""A genuine command on a terminal, alone or under guard, injured or not: what is on its screen, and when."""

from __future__ import annotations

import errno
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.guard.commands import STEPS, Command, free_port
from tests.guard.injuries import NONE, Injury

START = 180.0
"""Seconds until the first checkpoint, after which a run is ended from outside."""
WINDOW = (40, 120)
"""Lines and columns of the terminal. Without them, progress bars are not drawn."""
LONG = 2000
"""Steps of a run that is struck in the middle."""
SOURCE = Path(__file__).parents[2] / "src"
_MAIN = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); from reshard.__main__ import main; main()"
GUARD = (sys.executable, "-c", _MAIN, "guard")
"""Not by way of PYTHONPATH: the command must not find reshard."""
MARK = "RESHARD_TEST_RUN"
"""A variable by which the processes of a run are found, wherever their parents went."""


@dataclass
class Running:
    """A run: `began` and `struck` are times of the monotonic clock, in seconds, and so are those in `printed`."""

    command: Command
    folder: Path
    mark: str
    process: subprocess.Popen[bytes]
    began: float
    struck: float = 0.0
    printed: list[tuple[float, str]] = field(default_factory=list)

    @property
    def processes(self) -> Iterator[psutil.Process]:
        """All processes of the run that are alive, parents before their children."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    yield process

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank, not its data loader's."""
        for process in self.processes:
            with suppress(psutil.Error):
                parent = process.parent()
                if self._number(process) == number and (parent is None or self._number(parent) != number):
                    return process
        raise LookupError(f"rank {number} does not run")

    @staticmethod
    def _number(process: psutil.Process) -> int | None:
        with suppress(psutil.Error):
            return int(process.environ().get("RANK", -1))
        return None

    @property
    def screen(self) -> str:
        """What is left on the screen: of a line that was redrawn, its last state."""
        return _drawn("".join(text for _, text in self.printed))

    def shown(self, pattern: str) -> float | None:
        """When the screen first showed a pattern after the strike, or None."""
        text, looked_for = "", re.compile(pattern)
        for when, part in self.printed:
            if when >= self.struck:
                text = text[-1000:] + part
                if looked_for.search(text):
                    return when
        return None

    def read(self, terminal: int) -> None:
        """Keep what appears on the terminal until it closes."""
        while True:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError as error:  # Linux closes a terminal with EIO
                assert error.errno == errno.EIO, error
                return
            if not part:
                return
            self.printed.append((time.monotonic(), part.decode(errors="replace")))

    def kill(self) -> None:
        for process in list(self.processes):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class Outcome:
    """The end of a run. Seconds are since the injury, or since the start; None if it did not happen in time."""

    status: int | None
    visible: float | None
    ended: float | None
    seconds: float
    screen: str


def run(
    command: Command,
    folder: Path,
    injury: Injury = NONE,
    guard: tuple[str, ...] | None = None,
) -> Outcome:
    """Run a command in a folder that was prepared. `guard` are options of the guard, None runs it alone."""
    for left in ("out", "reshard-guard"):
        shutil.rmtree(folder / left, ignore_errors=True)
    port, mark = free_port(), uuid.uuid4().hex
    words = (*command.filled(port, LONG if injury.strike else STEPS), *injury.words(command))
    before = () if guard is None else (*GUARD, *guard, *injury.guard, "--")
    surroundings = {**command.surroundings(port), MARK: mark}
    with injury.arranged(folder, port) as variables:
        terminal, end = pty.openpty()
        termios.tcsetwinsize(end, WINDOW)
        began = time.monotonic()
        process = subprocess.Popen(
            [*before, *words],
            cwd=folder,
            env={**surroundings, **variables},
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
        )
        os.close(end)
        running = Running(command, folder, mark, process, began, began)
        reader = threading.Thread(target=running.read, args=(terminal,))
        reader.start()
        try:
            if injury.strike and _has_saved(running):
                running.struck = time.monotonic()
                injury.strike(running)
            status = _waited(process, running.struck + injury.limit)
            ended = time.monotonic()
        finally:
            running.kill()
            reader.join()
            os.close(terminal)
            process.wait()
    visible = running.shown(injury.shows)
    return Outcome(
        status,
        None if visible is None else visible - running.struck,
        None if status is None else ended - running.struck,
        ended - began,
        running.screen,
    )


def _has_saved(running: Running) -> bool:
    """Wait for the first checkpoint and a little longer; returns whether the run is still alive then."""
    first = running.folder / running.command.saves.format(step=10)
    while not first.exists():
        if running.process.poll() is not None or time.monotonic() > running.began + START:
            return False
        time.sleep(0.05)
    time.sleep(1)
    return running.process.poll() is None


def _waited(process: subprocess.Popen[bytes], until: float) -> int | None:
    """The exit status, or None if it is still running at a time of the monotonic clock."""
    try:
        return process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _drawn(text: str) -> str:
    """Lines as they remain on a terminal: without colours, and of a line that was redrawn its last state."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in plain.split("\n"))
