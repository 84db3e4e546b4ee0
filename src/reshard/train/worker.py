"""What each rank runs: `python -m reshard.train.worker RUN.json`, under torchrun, Slurm or `accelerate launch`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from reshard.train.engine import engine_of
from reshard.train.monitor import monitor_of
from reshard.train.run import Run

TRAINED = "trained.json"
"""What a finished run leaves for `finish.py`: the last checkpoint and the digests of its weights."""


def work(run: Run) -> None:
    """One rank's part of a run. Raises what the engine raises."""
    monitor = monitor_of(run)
    trained = engine_of(run).train(run, monitor)
    if int(os.environ.get("RANK", "0")) == 0:
        content = {**asdict(trained), "checkpoint": str(trained.checkpoint)}
        (run.output / TRAINED).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    work(Run.read(Path(sys.argv[1])))
