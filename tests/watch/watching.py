"""The real `reshard watch` in its own process, and the events that it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.commandline import apart, follows_schema, within

Event = dict[str, Any]


def events_of(printed: str) -> list[Event]:
    """The events in the lines of `--json`, each of which conforms to the schema."""
    lines = printed.splitlines()
    for line in lines:
        follows_schema("watch", line)
    return [json.loads(line) for line in lines]


def watch_once(*words: object, **environment: str) -> tuple[int, list[Event], str]:
    """The exit status, the events and stderr of `reshard watch … --once`."""
    done = apart("watch", *words, "--once", "--json", **environment)
    return done.returncode, events_of(done.stdout), done.stderr


def told(events: Sequence[Event], *names: str) -> list[tuple[str, str]]:
    """The events of some kinds, with the names of their steps; all but `found` by default."""
    return [
        (each["event"], each["name"])
        for each in events
        if (each["event"] in names if names else each["event"] != "found")
    ]


class Watching:
    """A watch that runs. Its output is in files, so that nothing is waited for."""

    def __init__(self, folder: Path, words: Sequence[object], environment: dict[str, str]) -> None:
        self._out, self._err = folder / "watch.out", folder / "watch.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "reshard", "watch", *map(str, words), "--json"],
                stdout=out,
                stderr=err,
                env={**os.environ, **environment},
            )

    @property
    def events(self) -> list[Event]:
        text = self._out.read_text()
        return events_of(text[: text.rfind("\n") + 1])

    @property
    def err(self) -> str:
        return self._err.read_text()

    def until(self, holds: Callable[[], object]) -> None:
        """Wait for a condition, while the watch runs."""
        with within(120):
            while not holds():
                assert self.process.poll() is None, self.err
                time.sleep(0.02)

    def end(self, number: signal.Signals) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def watching(folder: Path, *words: object, **environment: str) -> Iterator[Watching]:
    """A watch that is killed at the end of the block, if it still runs."""
    started = Watching(folder, words, environment)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder but the record, which has the command and the time."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "reshard.json"
    }
