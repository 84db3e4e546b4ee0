"""How a run goes: each step as a line of `metrics.jsonl`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from reshard.train.run import Run

METRICS = "metrics.jsonl"


class Metrics:
    """Writes what rank 0 reports; other ranks say nothing."""

    def __init__(self, run: Run, rank: int) -> None:
        self._file = run.output / METRICS if rank == 0 else None

    def begin(self, steps: int, done: int = 0) -> None:
        """Training starts after step `done`, and ends with step `steps`."""
        self._write({"event": "begin", "steps": steps, "done": done})

    def step(self, step: int, **metrics: float) -> None:
        """What a step measured."""
        self._write({"event": "step", "step": step, **metrics})

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint is complete on disk."""
        self._write({"event": "saved", "checkpoint": str(checkpoint)})

    def note(self, text: str) -> None:
        """What the user should know."""
        self._write({"event": "note", "text": text})

    def _write(self, row: dict[str, object]) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def monitor_of(run: Run) -> Metrics:
    """The monitor of this rank."""
    return Metrics(run, int(os.environ.get("RANK", "0")))
