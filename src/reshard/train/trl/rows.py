"""The data of a run, read once on each node: other ranks map what the first one wrote, and what TRL makes of it.

A `Data` is what the run is trained on, and what it is evaluated on.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from reshard.train.data import load_dataset
from reshard.train.run import Run
from reshard.train.trl import devices

FOLDER = ".data"
"""Where in the output the data lie as Arrow files while ranks train, one folder for each node."""


class Data(NamedTuple):
    """Each a `datasets.Dataset`; None where the run is not evaluated."""

    train: Any
    evaluation: Any


@contextmanager
def rows_of(run: Run) -> Iterator[Data]:
    """The data of a run. With several ranks it lies in a file, beside which TRL caches its tokens.

    Otherwise each rank would hold all of them, and make all of them again. Raises ReshardError for wrong records.
    """
    from datasets import Dataset

    if devices.world_size() == 1:
        yield Data(
            *(path and load_dataset(path, run.method, **run.reading) for path in (run.data, run.eval_data))
        )
        return
    folder = run.output / f"{FOLDER}-{platform.node()}"
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        _write(run, folder)
    devices.barrier()
    try:
        parts = {part.name: Dataset.load_from_disk(str(part)) for part in folder.iterdir()}
        yield Data(parts["train"], parts.get("eval"))
        devices.barrier()
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)


def _write(run: Run, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    for name, path in {"train": run.data, "eval": run.eval_data}.items():
        if path:
            load_dataset(path, run.method, **run.reading).save_to_disk(str(folder / name))
