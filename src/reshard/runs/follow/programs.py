"""Programs that are started for a step: the command of --run, and the server that it reads from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread

from reshard.base.errors import ReshardError
from reshard.base.options import options_of
from reshard.base.plain_json import json_of
from reshard.base.start_environment import start_environment
from reshard.runs.guard.supervise.child_processes import end_with_parent
from reshard.serve.options import ShownOptions
from reshard.serve.repositories import OWNER, Repository, repositories_below

STDERR = 2
"""What a command prints goes there: stdout has the events."""


@contextmanager
def _started(words: Sequence[str], stdout: int, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs until the block ends, and whatever it has started with it if the block fails."""
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env={**start_environment(), **variables},
        start_new_session=True,
        preexec_fn=partial(end_with_parent, signal.SIGTERM, os.getpid()),
    ) as program:
        try:
            yield program
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGTERM)
            raise


def run_program(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """The exit status of a command, negative if a signal ended it. Raises OSError if it cannot be started."""
    with _started(words, STDERR, **variables) as program:
        return program.wait()


@contextmanager
def served(run: Repository, options: ShownOptions) -> Iterator[tuple[str, dict[str, str]]]:
    """The name of a run that `reshard serve` shows, and the variables to find it. Raises ReshardError."""
    words = [
        sys.executable,
        "-m",
        "reshard",
        "serve",
        str(run.folder),
        "--port",
        "0",
        "--json",
        *_typed(options),
    ]
    with _started(words, subprocess.PIPE, RESHARD_TOKEN="") as server:
        if b"address" not in (line := server.stdout.readline() if server.stdout else b""):
            raise ReshardError(
                "server-not-started",
                "reshard serve did not start",
                file=str(run.folder),
                remedy=f"see why: reshard serve {run.folder}; or convert each step: --to DIR",
            )
        Thread(target=deque, args=(server.stdout, 0), daemon=True).start()  # else it waits for a reader
        (name,) = repositories_below((run.folder,))
        yield f"{OWNER}/{name}", {"HF_ENDPOINT": json_of(line)["address"]}
        server.terminate()


def _typed(options: ShownOptions) -> Iterator[str]:
    """The options of a server, as they are typed."""
    for each in options_of(ShownOptions):
        value = getattr(options, each.name)
        for one in value if isinstance(value, tuple) else [value] * (value != each.default):
            yield each.flag
            yield from [] if one is True else [str(one)]
