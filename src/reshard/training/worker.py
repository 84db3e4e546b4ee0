"""The program of each rank, `python -m reshard.training.worker RUN.json`, under torchrun, Slurm or `accelerate`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from reshard.base.errors import Problem, ReshardError
from reshard.base.plain_json import put
from reshard.guard.supervise.child_processes import end_with_parent
from reshard.training import signals
from reshard.training.collectives import meet
from reshard.training.engine_registry import engine_of
from reshard.training.launching import torchrun
from reshard.training.run import Run
from reshard.training.show import trackers
from reshard.training.show.metrics import MetricsWriter, monitor_of

TRAINED_FILE = "trained.json"
"""What a finished run writes for `finish.py`: the last checkpoint and the digests of its weights."""
PROBLEMS_FILE = "problems.json"
"""What the first rank that fails or refuses to continue writes for the others and the launcher: a list of problems."""
REFUSED_STATUS = 2
"""The exit status of a rank that refuses to continue."""


def work(run: Run, monitor: MetricsWriter) -> None:
    """Run one rank. Raises what the engine raises, and Stopped after a signal."""
    try:
        trained = engine_of(run).train(run, monitor)
    except signals.StoppedRun as stop:
        monitor.stopped(stop)
        meet()  # other nodes read how it ended
        _leave_group()
        raise
    if first():
        content = {**asdict(trained), "checkpoint": str(trained.checkpoint)}
        put(run.output / TRAINED_FILE, content)
    _leave_group()


def first() -> bool:
    """Whether this is rank 0."""
    return os.environ.get("RANK", "0") == "0"


def claim(output: Path, problems: Sequence[Problem]) -> bool:
    """Whether this rank is the first to fail; if so, it writes its problems: none if it does not refuse to continue."""
    try:
        with (output / PROBLEMS_FILE).open("x", encoding="utf-8") as file:
            json.dump([problem.as_dict() for problem in problems], file)
    except FileExistsError:
        return False
    return True


def claimed(output: Path) -> list[Problem]:
    """The problems that a rank has written; none if no rank refused."""
    with suppress(OSError, ValueError, TypeError):
        return [Problem(**each) for each in json.loads((output / PROBLEMS_FILE).read_text(encoding="utf-8"))]
    return []


def _leave_group() -> None:
    """Destroy the process group if the engine left one, so that no rank waits for another at exit."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def main(record: Path) -> None:
    """Run a rank that torchrun started. Refusals go to the launcher, other errors are tracebacks in the log.

    A rank that a signal stopped ends with status 0, so that torchrun does not restart it.
    """
    end_with_parent()
    torchrun.wait()
    run = Run.read(record)
    if restarted():
        if claimed(run.output):
            sys.exit(REFUSED_STATUS)  # it would be refused again
        run = replace(run, resume=True)
    try:
        with signals.listening(None):
            work(run, monitor_of(run, trackers.listeners(run) if first() else []))
    except signals.StoppedRun:
        return
    except ReshardError as error:
        traceback.print_exc()
        claim(run.output, error.problems)
        sys.exit(REFUSED_STATUS)


def restarted() -> bool:
    """Whether torchrun has restarted this rank after one had failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    record(main)(Path(sys.argv[1]))
