"""Starts torchrun, if possible during the preflight: its ranks import what they need, and then wait.

The first rank goes on with the preflight, so that the launcher need not import the same packages.

This module is run instead of torchrun, whose import takes a second: it starts a single rank by itself. It gives the
ranks a pipe as standard input, from which each reads a byte before it reads anything else (`wait`), which `Torchrun.go`
fills. If that never happens, the ranks end with this module, and this module with the launcher.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.base.plain_json import put
from reshard.guard.end.completeness import RUN_RECORD
from reshard.guard.supervise.child_processes import end_with_parent
from reshard.guard.watch.stack_signal import FOLDER_VARIABLE

if TYPE_CHECKING:
    from reshard.training.preflight_report import Preflight
    from reshard.training.run import Run

TORCHRUN_MODULE = "torch.distributed.run"
SINGLE_RANK_ENVIRONMENT = {
    **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any free port
}
"""The variables that torchrun gives to a single rank."""
TERM_SECONDS = 30.0
"""Seconds that a rank gets to end after SIGTERM, as from torchrun."""
POLL_SECONDS = 0.02
"""Seconds between two looks for the result of the first rank."""
GATE_VARIABLE = "_RESHARD_GATE"
"""Makes a rank wait, and names the folder with the record of its run, if `run.json` is only written later."""
GATE_BYTES = b"." * (1 << 14)
"""One for each rank and each restart: a quarter of a pipe's capacity."""
LOOKING, LOOKED = "looking.pickle", "looked.pickle"
"""A preflight as far as the launcher made it, and what came of it in the first rank."""


@dataclass
class Torchrun:
    """torchrun with ranks that wait for `go`. `output` is the pipe with all that they print."""

    process: subprocess.Popen[bytes]
    folder: Path
    output: int

    @staticmethod
    def start(
        words: Sequence[str],
        environment: Mapping[str, str],
        near: Path,
        run: Run | None = None,
        looking: bytes | None = None,
    ) -> Torchrun:
        """Start `python -m MODULE …`, torchrun or a rank, with a folder in `near`; the ranks of `run` import meanwhile.

        Raises OSError if `near` is not writable.
        """
        folder = Path(tempfile.mkdtemp(prefix=".reshard-train-", dir=near))
        if run:
            put(folder / RUN_RECORD, run.as_dict())
        if looking:
            (folder / LOOKING).write_bytes(looking)
        output, end = os.pipe()
        process = subprocess.Popen(
            [words[0], "-m", "reshard.training.launching.torchrun", str(folder), *words[2:]],
            stdin=subprocess.PIPE,
            stdout=end,
            stderr=subprocess.STDOUT,
            env={**environment, GATE_VARIABLE: str(folder) if run else "", FOLDER_VARIABLE: str(folder)},
            start_new_session=True,
            preexec_fn=partial(_be_torchrun, os.getpid()),
        )
        os.close(end)
        return Torchrun(process, folder, output)

    def looked(self) -> Preflight | None:
        """Wait for the first rank's preflight; None if it cannot be had."""
        file = self.folder / LOOKED
        while not file.exists():
            if self.process.poll() is not None:
                return None
            time.sleep(POLL_SECONDS)
        found: Preflight | None = pickle.loads(file.read_bytes())
        return found

    def go(self) -> None:
        """Let the ranks start."""
        assert self.process.stdin
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # the caller notices if it has ended
            pipe.write(GATE_BYTES)

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *raised: object) -> None:
        """End torchrun, if it still runs, and its ranks with it. Calling it again changes nothing."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()
        with suppress(OSError):  # a relay has closed it
            os.close(self.output)
        shutil.rmtree(self.folder, ignore_errors=True)  # the log has all of it


def _be_torchrun(parent: int) -> None:
    """End with the launcher; and leave SIGUSR1, which Slurm may send to all processes of a step, to the ranks."""
    end_with_parent(signal.SIGTERM, parent)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def wait() -> None:
    """In a rank: import what its engine needs, if there is time, then wait for `go`; end here if it never comes."""
    folder = os.environ.pop(GATE_VARIABLE, None)
    if folder is None:
        return  # a user typed torchrun's command
    if folder:
        _use(Path(folder))
    if not os.read(0, 1):
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _use(folder: Path) -> None:
    """Import what the run needs; and in the first rank, go on with its preflight."""
    looking, found = folder / LOOKING, None
    with suppress(Exception):  # it is reported when it matters
        from reshard.training.engine_registry import engine_of
        from reshard.training.run import Run

        run = Run.read(folder)
        if engine_of(run).warm(run) and os.environ["RANK"] == "0" and looking.exists():
            found = pickle.loads(looking.read_bytes()).further()
    if os.environ["RANK"] == "0":
        partial = folder / f".{LOOKED}"
        partial.write_bytes(pickle.dumps(found))
        partial.replace(folder / LOOKED)


def main(folder: Path, module: str, words: Sequence[str]) -> None:
    """Run torchrun, or a single rank, and remove the folder at the end."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # until torchrun has its own
    signal.signal(signal.SIGUSR1, lambda number, frame: None)  # ranks would inherit that it is ignored
    try:
        if module != TORCHRUN_MODULE:
            sys.exit(_run_alone(module, words))
        from torch.distributed.run import main as torchrun

        torchrun([f"--log-dir={folder}", *words])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_alone(module: str, words: Sequence[str]) -> int:
    """Run a single rank. Returns its exit status, as in a shell."""
    rank = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env={**os.environ, **SINGLE_RANK_ENVIRONMENT},
        start_new_session=True,
    )
    try:
        code = rank.wait()
    except SystemExit:
        rank.terminate()
        with suppress(subprocess.TimeoutExpired):
            rank.wait(TERM_SECONDS)
        rank.kill()
        raise
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
