"""Starts a real command, and feeds watchers with its lines and processes, as the guard does."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from reshard.runs.guard.watch.process_tree import Processes, ProcessTree
from reshard.runs.guard.watch.watcher import Notice, OutputLine, Watcher

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
    "--nproc-per-node=2",
)


class Watched(NamedTuple):
    """What was said, how many seconds after the start, and what the command printed."""

    notices: list[tuple[float, Notice]]
    lines: list[str]
    code: int | None
    start: float = 0.0
    """Seconds since the epoch."""

    @property
    def codes(self) -> list[str]:
        """The codes of what was said."""
        return [notice.problem.code for _, notice in self.notices]

    @property
    def text(self) -> str:
        """What was said, as text."""
        return "\n".join(line for _, notice in self.notices for line in (str(notice.problem), *notice.lines))


def watch(
    command: Sequence[str | Path],
    *watchers: Watcher,
    environment: Mapping[str, str] | None = None,
    act: Callable[[Processes, Watched], None] = lambda processes, seen: None,
    until: int | None = None,
    every: float = 0.1,
    most: float = 300,
    stdin: int = subprocess.DEVNULL,
) -> Watched:
    """Run a command to its end, or until so many notices. `act` is called at each tick, and can send signals."""
    start = time.time()
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=stdin,
        cwd=REPOSITORY,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}",
            **(environment or {}),
        },
    )
    printed: queue.Queue[OutputLine] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=_read, args=(process.stdout, printed), daemon=True).start()
    seen = Watched([], [], None, start)
    tree = ProcessTree(process.pid)
    try:
        while process.poll() is None and (until is None or len(seen.notices) < until):
            assert time.time() - start < most, "\n".join(seen.lines[-20:])
            while not printed.empty():
                line = printed.get()
                seen.lines.append(line.text)
                _note(seen, start, (notice for each in watchers for notice in each.line(line)))
            now, processes = time.time(), tree.snapshot()
            _note(seen, start, (notice for each in watchers for notice in each.tick(now, processes)))
            act(processes, seen)
            time.sleep(every)
    finally:
        left = tree.snapshot()
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        code = process.wait()
    return seen._replace(code=code)


def _note(seen: Watched, start: float, notices: object) -> None:
    seen.notices.extend((time.time() - start, notice) for notice in notices)  # type: ignore[attr-defined]


def _read(output: IO[bytes], printed: queue.Queue[OutputLine]) -> None:
    while chunk := os.read(output.fileno(), 1 << 16):
        for text in re.split(r"[\r\n]+", chunk.decode(errors="replace")):
            if text:
                printed.put(OutputLine(time.time(), text))
